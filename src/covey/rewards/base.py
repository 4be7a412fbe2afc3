r"""What a reward function is, and how it is found by name.

A reward function has the signature

    def my_reward(responses: list[str], rows: list[dict], config: dict) -> list[float | None | dict]

`rows[i]` has every raw column of the prompt of `responses[i]`, plus `prompt` and `response` (the reference answer);
`config` is the entry's `options`. One value per response: a number; None when the function does not apply to that
response (it is left out of mean and std); or a dict with `score` and named parts, all numbers, that explain it.
NaN, infinity, a value of another type or a list of another length is an error of the function, never a zero.

Names: a key of REWARDS, "module:function" (the working directory is importable) or "path/to/file.py:function".
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Score = float | None | dict[str, float]
RewardFn = Callable[..., Any]  # (responses, rows, config) -> list[Score], or one of the forms in adapters.py


@dataclass(frozen=True)
class BuiltIn:
    """A registered reward function and what the runner has to know about it."""

    path: str  # "module:function"
    range: tuple[float, float] = (0.0, 1.0)  # lowest and highest score
    include: tuple[str, ...] = ()  # facts about the response that it reads from the row
    settings: tuple[str, ...] = ()  # settings of the run that become options unless the entry gives them
    timeout_s: float | None = None  # time limit per response when the entry gives none, instead of reward.timeout_s
    cache: bool = True  # equal response, row and options have equal scores
    imports: tuple[str, ...] = ()  # modules that take seconds to import: before the first time limit starts


_ALGEBRA = ("math_verify", "sympy")
REWARDS: dict[str, BuiltIn] = {
    "math": BuiltIn("covey.rewards.math_answer:math_reward", imports=_ALGEBRA),
    "answer": BuiltIn("covey.rewards.math_answer:answer_reward", imports=_ALGEBRA),
    "code": BuiltIn("covey.rewards.code_tests:code_reward", settings=("sandbox",)),
    "judge": BuiltIn("covey.rewards.judge:judge_reward", timeout_s=120.0, cache=False),
    "format": BuiltIn("covey.rewards.rules:format_reward"),
    "overlong": BuiltIn(
        "covey.rewards.rules:overlong_reward", (-1.0, 0.0), ("num_tokens",), settings=("max_response_length",)
    ),
    "length": BuiltIn("covey.rewards.rules:length_reward", include=("num_tokens",)),
    "repetition": BuiltIn("covey.rewards.rules:repetition_reward", (-1.0, 0.0)),
    # MindSpeed-RL's names
    "acc": BuiltIn("covey.rewards.mindspeed:acc", (-1.0, 1.0), imports=_ALGEBRA),
    "acc_for_ppo": BuiltIn("covey.rewards.mindspeed:acc_for_ppo", imports=_ALGEBRA),
    "acc_for_dapo": BuiltIn("covey.rewards.mindspeed:acc_for_dapo", (-1.0, 1.0), imports=_ALGEBRA),
    "base_acc": BuiltIn("covey.rewards.mindspeed:base_acc", imports=_ALGEBRA),
    "math_17k_acc": BuiltIn("covey.rewards.mindspeed:acc_for_ppo", imports=_ALGEBRA),
    "math_verify_reward": BuiltIn("covey.rewards.mindspeed:base_acc", imports=_ALGEBRA),
    "step": BuiltIn("covey.rewards.mindspeed:step"),
    "strict_format": BuiltIn("covey.rewards.mindspeed:strict_format", (-0.5, 1.0)),
}


def split_name(name: str) -> tuple[str, str]:
    """(module or file, function) behind a name; ValueError for one that is not registered and has no colon."""
    path = REWARDS[name].path if name in REWARDS else name
    module_name, colon, attribute = path.rpartition(":")
    if not colon:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        raise ValueError(
            f"reward {name!r} is unknown{f', did you mean {near[0]!r}?' if near else ''} "
            f'Known: {", ".join(sorted(REWARDS))}; or give "module:function" or "file.py:function"'
        )
    return module_name, attribute


def load_reward(name: str) -> RewardFn:
    """The function behind a registered name, "module:function" or "file.py:function".

    Raises ValueError for an unknown name (with the nearest known one), a module or file that does not import,
    an attribute that is missing or not callable.
    """
    module_name, attribute = split_name(name)
    module = _load_file(name, module_name) if module_name.endswith(".py") else _load_module(name, module_name)
    function = getattr(module, attribute, None)
    if function is None:
        names = [key for key, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(attribute, names, n=1)
        raise ValueError(f"reward {name!r}: no {attribute!r} there{f', did you mean {near[0]!r}?' if near else ''}")
    if not callable(function):
        raise ValueError(f"reward {name!r}: {attribute!r} is a {type(function).__name__}, not a function")
    return function


def source_digest(name: str) -> str:
    """Hash of the source file of a user's function (without importing it), so that a cache sees edits; "" for ours."""
    module_name, colon, _ = name.rpartition(":")
    if not colon:
        return ""
    if module_name.endswith(".py"):
        path = Path(module_name).expanduser()
    else:
        spec = importlib.util.find_spec(module_name)
        path = Path(spec.origin) if spec is not None and spec.origin else Path()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def read_options(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Defaults overlaid with `config`; a key that is not in `defaults` is a ValueError with the nearest known key."""
    for key in config:
        if key not in defaults:
            near = difflib.get_close_matches(key, defaults, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"option {key!r} is unknown: {hint}known: {', '.join(sorted(defaults)) or 'none'}")
    return {**defaults, **config}


def check_score(value: object) -> tuple[float | None, dict[str, float]]:
    """(score, parts) of one returned value; ValueError when it is not a finite number, None or a dict of such."""
    if value is None:
        return None, {}
    if isinstance(value, dict):
        if "score" not in value:
            raise ValueError(f"a dict without 'score': {sorted(map(str, value))}")
        parts = {str(key): _number(part) for key, part in value.items() if key != "score" and part is not None}
        return (None if value["score"] is None else _number(value["score"])), parts
    return _number(value), {}


def _number(value: object) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise ValueError(f"a score of type {type(value).__name__}: {value!r:.80}")
    number = float(value)  # type: ignore[arg-type]  # bool, int, float and the scalars of numpy and torch
    if not math.isfinite(number):
        raise ValueError(f"a score that is not finite: {number}")
    return number


def _load_module(name: str, module_name: str) -> Any:
    if module_name not in sys.modules and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"reward {name!r}: module {module_name!r} does not import: {error}") from error


def _load_file(name: str, file_name: str) -> Any:
    path = Path(file_name).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"reward {name!r}: no file {path}")
    key = f"covey_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward {name!r}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module  # before running it: dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        del sys.modules[key]
        raise ValueError(f"reward {name!r}: {path} does not import: {error}") from error
    return module
