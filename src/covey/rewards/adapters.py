"""Reward functions written for other trainers, recognised by the names of their parameters and called as they expect.

covey        (responses, rows, config)                                       -> list
trl          (prompts, completions, **columns)                               -> list; `completions` decides
verl         (data_source, solution_str, ground_truth, extra_info)           -> one number or dict, per response
mindspeed    (sequences, answers, tool_call_nums)                            -> list; `sequences`, `answers` decide

Columns come from the row. TRL's completions are texts, or lists with one assistant message when the row's `prompt` is a
list of messages; verl's ground_truth is `reward_model.ground_truth` when the row has it, else the reference answer, as
are MindSpeed-RL's answers. Left out: what those trainers pass about themselves (TRL's trainer_state, log_metric).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from covey.rewards.base import RewardFn

Row = dict[str, Any]


@dataclass(frozen=True)
class Adapted:
    """A reward function in Covey's form. `call` is a coroutine function when `is_async`."""

    call: RewardFn  # (responses, rows, config) -> list
    form: str  # covey, trl, verl, mindspeed
    is_async: bool


def adapt(function: RewardFn) -> Adapted:
    """Bring `function` into Covey's form; ValueError when its parameters fit none of the known forms."""
    parameters = inspect.signature(function).parameters
    names = set(parameters)
    is_async = any(inspect.iscoroutinefunction(f) for f in (function, vars(type(function)).get("__call__")))
    if "completions" in names:
        return Adapted(_one_call(function, _trl_arguments, is_async), "trl", is_async)
    if {"solution_str", "ground_truth"} <= names:
        return Adapted(_call_each(function, _verl_arguments, is_async), "verl", is_async)
    if {"sequences", "answers"} <= names:
        return Adapted(_one_call(function, _mindspeed_arguments, is_async), "mindspeed", is_async)
    try:
        inspect.signature(function).bind([], [], {})
    except TypeError as error:
        raise ValueError(
            f"a reward function takes (responses, rows, config), or the parameters of TRL (prompts, completions, ...), "
            f"verl (data_source, solution_str, ground_truth, extra_info) or MindSpeed-RL (sequences, answers, ...); "
            f"this one takes ({', '.join(parameters)})"
        ) from error
    return Adapted(function, "covey", is_async)


def _trl_arguments(names: set[str], takes_any: bool, responses: list[str], rows: list[Row]) -> dict[str, Any]:
    chat = bool(rows) and isinstance(rows[0].get("prompt"), list)
    completions = [[{"role": "assistant", "content": text}] if chat else text for text in responses]
    given: dict[str, Any] = {"prompts": [row.get("prompt") for row in rows], "completions": completions}
    if "completion_ids" in names:
        given["completion_ids"] = [row["token_ids"] for row in rows]
    columns = set().union(*rows) - {"prompt", "completion"} if rows else set()
    given.update({key: [row.get(key) for row in rows] for key in columns if key not in given})
    return given if takes_any else {key: value for key, value in given.items() if key in names}


def _verl_arguments(names: set[str], takes_any: bool, response: str, row: Row) -> dict[str, Any]:
    model = row.get("reward_model")
    gold = model["ground_truth"] if isinstance(model, dict) and "ground_truth" in model else row.get("response")
    given = {
        "data_source": row.get("data_source"),
        "solution_str": response,
        "ground_truth": gold,
        "extra_info": row.get("extra_info"),
    }
    return given if takes_any else {key: value for key, value in given.items() if key in names}


def _mindspeed_arguments(names: set[str], takes_any: bool, responses: list[str], rows: list[Row]) -> dict[str, Any]:
    given = {
        "sequences": responses,
        "answers": [row.get("response") for row in rows],
        "tool_call_nums": [row.get("tool_call_nums", 0) for row in rows],
    }
    return given if takes_any else {key: value for key, value in given.items() if key in names}


def _signature(function: RewardFn) -> tuple[set[str], bool]:
    parameters = inspect.signature(function).parameters
    return set(parameters), any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _one_call(function: RewardFn, arguments: Callable[..., dict[str, Any]], is_async: bool) -> RewardFn:
    names, takes_any = _signature(function)

    async def call_async(responses: list[str], rows: list[Row], config: dict[str, Any]) -> Any:
        return await function(**arguments(names, takes_any, responses, rows), **_options(config, names, takes_any))

    def call(responses: list[str], rows: list[Row], config: dict[str, Any]) -> Any:
        return function(**arguments(names, takes_any, responses, rows), **_options(config, names, takes_any))

    return call_async if is_async else call


def _call_each(function: RewardFn, arguments: Callable[..., dict[str, Any]], is_async: bool) -> RewardFn:
    names, takes_any = _signature(function)

    async def call_async(responses: list[str], rows: list[Row], config: dict[str, Any]) -> list[Any]:
        extra = _options(config, names, takes_any)
        return [
            _numbers_only(await function(**arguments(names, takes_any, text, row), **extra))
            for text, row in zip(responses, rows, strict=True)
        ]

    def call(responses: list[str], rows: list[Row], config: dict[str, Any]) -> list[Any]:
        extra = _options(config, names, takes_any)
        return [
            _numbers_only(function(**arguments(names, takes_any, text, row), **extra))
            for text, row in zip(responses, rows, strict=True)
        ]

    return call_async if is_async else call


def _options(config: dict[str, Any], names: set[str], takes_any: bool) -> dict[str, Any]:
    """The entry's options as keyword arguments; one that the function does not take is an error."""
    unknown = [] if takes_any else sorted(set(config) - names)
    if unknown:
        raise ValueError(f"options {unknown} are no parameters of the function, which takes {sorted(names)}")
    return config


def _numbers_only(value: Any) -> Any:
    """verl's results may carry texts beside the score (`pred`); they are no parts."""
    if not isinstance(value, dict):
        return value
    return {key: part for key, part in value.items() if key == "score" or isinstance(part, (bool, int, float))}
