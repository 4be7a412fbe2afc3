r"""MindSpeed-RL's verifiers under their names and with their scores, for configurations that come from there.

Written from the description of its rule_verifier.py; where this deviates, and why:
- The reference is extracted too. Upstream compares a boxed value with the whole label, so tagged labels never match.
- Answers are compared by algebra.same_answer in all of them; upstream uses three graders that differ in detail.
- A time limit or an exception gives no score (counted); upstream gives 0.0, which for `acc` is better than wrong.
- `format` is rules.format_reward: tags once, in order, closed, nothing around. Upstream lets text follow a line end.
- `retool_reward` is left out: it scores tool calls, and there are none here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from covey.rewards.algebra import same_answer
from covey.rewards.base import Score, read_options
from covey.rewards.extraction import extract_reference, last_boxed
from covey.rewards.math_answer import reference_of

Row = dict[str, Any]

_STEP = re.compile(
    r"(?m)\bStep \d+:|^\s*\d+\.\s|^\s*[-*•]\s|\b(?:First|Second|Third|Next|Then|Finally),"
)  # markers of a step
_BASE = ("<think>", "</think>", "<answer>", r"\boxed{", "}", "</answer>")
_STRICT = ("<think>", "</think>", "<answer>", r"\boxed{", "</answer>")
_MINERVA = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_DAPO_TAIL = 300  # characters


def acc(responses: list[str], rows: list[Row], config: dict[str, Any]) -> list[Score]:
    """1.0 for a right boxed answer, -0.5 for a wrong one, -1.0 without a box."""
    return _each(responses, rows, config, lambda text, gold: _boxed(text, gold, right=1.0, wrong=-0.5, none=-1.0))


def acc_for_ppo(responses: list[str], rows: list[Row], config: dict[str, Any]) -> list[Score]:
    """1.0 for a right boxed answer, else 0.0; whatever the form. Also `math_17k_acc`."""
    return _each(responses, rows, config, lambda text, gold: _boxed(text, gold, right=1.0, wrong=0.0, none=0.0))


def base_acc(responses: list[str], rows: list[Row], config: dict[str, Any]) -> list[Score]:
    """1.0 for a right boxed answer in a text of think, then answer with a box; else 0.0. Also `math_verify_reward`."""

    def score(text: str, gold: str) -> float:
        return _boxed(text, gold, right=1.0, wrong=0.0, none=0.0) if _is_base(text.strip()) else 0.0

    return _each(responses, rows, config, score)


def acc_for_dapo(responses: list[str], rows: list[Row], config: dict[str, Any]) -> list[Score]:
    """1.0 when the last "Answer:" line in the last 300 characters is right, else -1.0."""

    def score(text: str, gold: str) -> float:
        found = _MINERVA.findall(text[-_DAPO_TAIL:])
        if not found:
            return -1.0
        boxed = last_boxed(found[-1])
        answer = found[-1].strip().rstrip(".").strip() if boxed is None else boxed
        return 1.0 if same_answer(answer, gold) else -1.0

    return _each(responses, rows, config, score)


def step(responses: list[str], rows: list[Row], config: dict[str, Any]) -> list[Score]:
    """Markers of steps ("Step 1:", numbered lines, bullets, "First," ...) over three, at most 1.0."""
    read_options(config, {})
    return [min(1.0, len(_STEP.findall(text)) / 3) for text in responses]


def strict_format(responses: list[str], rows: list[Row], config: dict[str, Any]) -> list[Score]:
    r"""1.0 when think, /think, answer, \boxed{, /answer come once each, in order, and enclose the text; else -0.5."""
    read_options(config, {})
    return [1.0 if _is_strict(text.strip()) else -0.5 for text in responses]


def _is_base(text: str) -> bool:
    """Whether the marks of _BASE follow one another, from the start of the text to its end."""
    position = 0
    for mark in _BASE:
        found = text.find(mark, position)
        if found < 0:
            return False
        position = found + len(mark)
    return text.startswith(_BASE[0]) and text.endswith(_BASE[-1])


def _is_strict(text: str) -> bool:
    places = [text.find(mark) for mark in _STRICT]
    once = all(text.count(mark) == 1 for mark in _STRICT)
    return once and places == sorted(places) and places[0] == 0 and text.endswith(_STRICT[-1])


def _boxed(text: str, gold: str, *, right: float, wrong: float, none: float) -> float:
    boxed = last_boxed(text)
    if boxed is None:
        return none
    return right if same_answer(boxed, gold) else wrong


def _each(
    responses: list[str], rows: list[Row], config: dict[str, Any], score: Callable[[str, str], float]
) -> list[Score]:
    read_options(config, {})
    pairs = zip(responses, rows, strict=True)
    return [score(text, extract_reference(reference_of(row))) for text, row in pairs]
