"""Call one reward function on some responses and turn whatever happens into one Outcome per response.

Runs in a reward worker, or in the trainer's process when there are no workers. This is the only place that catches
every exception: what a reward function raises is counted and shown, and must not end the run (unless it shall).

The time limit here is the soft one: an alarm signal that interrupts Python code. Code that swallows it, or that is busy
inside one C call, is ended by the pool, which kills the worker a little later.
"""

from __future__ import annotations

import asyncio
import importlib
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from covey.rewards.adapters import Adapted, adapt
from covey.rewards.base import REWARDS, RewardFn, check_score, load_reward

Row = dict[str, Any]
Status = Literal["ok", "none", "error", "timeout"]

_FIRST_PAUSE_S = 0.5  # before the first retry; doubles with each further one


@dataclass(frozen=True)
class FunctionSpec:
    """One reward function of a run, as plain data. Example: FunctionSpec("math", name="math", weight=1.0)."""

    label: str  # the name in metrics and records
    name: str  # what base.load_reward takes
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)
    batch: bool = False  # one call for all responses of a group instead of one per response
    timeout_s: float = 10.0  # per response
    retries: int = 0  # further calls after an exception
    include: tuple[str, ...] = ()  # facts of the response to add to its row
    cache: bool = False  # equal response, row and options have equal scores
    digest: str = ""  # of a user's source file, for the cache
    range: tuple[float, float] = (0.0, 1.0)  # lowest and highest score

    def limit_s(self, num_responses: int, is_async: bool) -> float:
        """Longest time from the start of a job, or from its last outcome, to the next outcome, seconds."""
        pauses = _FIRST_PAUSE_S * (2**self.retries - 1)
        together = num_responses if self.batch and not is_async else 1
        return (self.timeout_s * (self.retries + 1)) * together + pauses


@dataclass(frozen=True)
class Outcome:
    """What became of one response under one function. Example: Outcome("ok", 0.6, {"format": 1.0, "answer": 0.0})."""

    status: Status
    score: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""  # kind of the error, for counting: exception type and place
    detail: str = ""  # traceback or message, for the log


class SoftTimeout(BaseException):
    """The time limit of a call has passed; no Exception, so that a function's own handlers let it through."""


def load(spec: FunctionSpec) -> Adapted:
    """The function of `spec` in Covey's form; ValueError when it cannot be loaded or refuses its options."""
    adapted = adapt(load_reward(spec.name))
    for module in REWARDS[spec.name].imports if spec.name in REWARDS else ():
        importlib.import_module(module)
    if adapted.call.__module__.startswith("covey.rewards.") and adapted.form == "covey":
        try:
            if adapted.is_async:
                asyncio.run(adapted.call([], [], dict(spec.options)))
            else:
                adapted.call([], [], dict(spec.options))  # built-in functions check their options first
        except ValueError as error:
            raise ValueError(f"reward {spec.label!r}: {error}") from error
    return adapted


def run(spec: FunctionSpec, function: Adapted, responses: list[str], rows: list[Row]) -> Iterator[tuple[int, Outcome]]:
    """(index, outcome) of every response, as they become known."""
    if function.is_async:
        yield from enumerate(asyncio.run(_call_together(spec, function.call, responses, rows)))
    elif spec.batch:
        yield from enumerate(_call_with_retries(spec, function.call, responses, rows))
    else:
        for index, (response, row) in enumerate(zip(responses, rows, strict=True)):
            yield index, _call_with_retries(spec, function.call, [response], [row])[0]


def call(function: RewardFn, responses: list[str], rows: list[Row], options: dict[str, Any]) -> list[Outcome]:
    """Outcomes of `function` called once with all responses; an exception is the outcome of each of them."""
    try:
        return _outcomes(function(responses, rows, options), len(responses))
    except SoftTimeout as error:
        return [Outcome("timeout", error="timeout", detail=_format(error))] * len(responses)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a reward function raises is counted
        return [failure(error)] * len(responses)


def failure(error: BaseException) -> Outcome:
    """The outcome of a call that raised `error`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return Outcome("error", error=f"{type(error).__name__}{place}", detail=_format(error))


def _call_with_retries(spec: FunctionSpec, fn: RewardFn, responses: list[str], rows: list[Row]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for attempt in range(spec.retries + 1):
        if attempt:
            time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
        try:
            with _alarm(spec.timeout_s * len(responses)):
                outcomes = call(fn, responses, rows, dict(spec.options))
        except SoftTimeout as error:  # the alarm rang just before or after the call itself
            outcomes = [Outcome("timeout", error="timeout", detail=_format(error))] * len(responses)
        if not any(outcome.status == "error" for outcome in outcomes):
            break
    return outcomes


async def _call_together(spec: FunctionSpec, fn: RewardFn, responses: list[str], rows: list[Row]) -> list[Outcome]:
    if spec.batch:
        return await _call_async(spec, fn, responses, rows)
    calls = [_call_async(spec, fn, [text], [row]) for text, row in zip(responses, rows, strict=True)]
    return [outcomes[0] for outcomes in await asyncio.gather(*calls)]


async def _call_async(spec: FunctionSpec, fn: RewardFn, responses: list[str], rows: list[Row]) -> list[Outcome]:
    outcome = Outcome("error")
    for attempt in range(spec.retries + 1):
        if attempt:
            await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
        try:
            values = await asyncio.wait_for(fn(responses, rows, dict(spec.options)), spec.timeout_s)
            return _outcomes(values, len(responses))
        except asyncio.TimeoutError as error:  # noqa: UP041 - on Python 3.10 it is not the builtin TimeoutError
            outcome = Outcome("timeout", error="timeout", detail=_format(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - as in call()
            outcome = failure(error)
    return [outcome] * len(responses)


def _outcomes(values: Any, num_responses: int) -> list[Outcome]:
    if not isinstance(values, (list, tuple)) and hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise ValueError(f"returned a {type(values).__name__} instead of a list with one value per response")
    if len(values) != num_responses:
        raise ValueError(f"returned {len(values)} values for {num_responses} responses")
    return [_outcome(value) for value in values]


def _outcome(value: object) -> Outcome:
    try:
        score, parts = check_score(value)
    except ValueError as error:
        return Outcome("error", error=f"returned {error}".split(":")[0], detail=f"the function returned {error}")
    return Outcome("none" if score is None else "ok", score, parts)


def _format(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise SoftTimeout in this block after `seconds`; without effect outside the process's main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise SoftTimeout(f"no result after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
