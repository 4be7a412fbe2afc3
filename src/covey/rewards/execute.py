"""Call one reward function on some responses and turn whatever happens into one Outcome per response.

Runs in a reward worker, or in the trainer's process when there are no workers. This is the only place that catches
every exception: what a reward function raises is counted and shown, and must not end the run (unless it shall).
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any, Literal

from covey.rewards.base import RewardFn, check_score

Row = dict[str, Any]
Status = Literal["ok", "none", "error", "timeout"]


@dataclass(frozen=True)
class FunctionSpec:
    """One reward function of a run, as plain data. Example: FunctionSpec("math", name="math", weight=1.0)."""

    label: str  # the name in metrics and records
    name: str  # what base.load_reward takes
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of one response under one function. Example: Outcome("ok", 0.6, {"format": 1.0, "answer": 0.0})."""

    status: Status
    score: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""  # kind of the error, for counting: exception type and place
    detail: str = ""  # traceback or message, for the log


def call(
    function: RewardFn, responses: list[str], rows: list[dict[str, Any]], options: dict[str, Any]
) -> list[Outcome]:
    """Outcomes of `function` called once with all responses; an exception is the outcome of each of them."""
    try:
        values = function(responses, rows, options)
        if not isinstance(values, (list, tuple)) and hasattr(values, "tolist"):
            values = values.tolist()
        if not isinstance(values, (list, tuple)):
            raise ValueError(f"returned a {type(values).__name__} instead of a list with one value per response")
        if len(values) != len(responses):
            raise ValueError(f"returned {len(values)} values for {len(responses)} responses")
    except Exception as error:  # noqa: BLE001 - anything a reward function raises is counted, never silently a zero
        return [failure(error)] * len(responses)
    return [_outcome(value) for value in values]


def failure(error: BaseException) -> Outcome:
    """The outcome of a call that raised `error`."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return Outcome("error", error=f"{type(error).__name__}{place}", detail="".join(traceback.format_exception(error)))


def _outcome(value: object) -> Outcome:
    try:
        score, parts = check_score(value)
    except ValueError as error:
        return Outcome("error", error=f"returned {error}".split(":")[0], detail=f"the function returned {error}")
    return Outcome("none" if score is None else "ok", score, parts)
