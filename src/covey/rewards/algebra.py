r"""Equality of final answers by computer algebra (the math-verify package): expressions, sets, intervals, matrices.

The costly half of the comparison; equality.equal_answers decides the plain cases first. Nothing here limits time: a
term such as 9^{9^{9}} keeps sympy busy for minutes inside one C call. The worker that runs the reward is killed then.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from covey.rewards.equality import clean, equal_answers

_MAX_CHARACTERS, _MAX_DEPTH = 400, 20  # "answers" that are longer or nested deeper are compared as text only
_MAX_SYMBOLS = 8
_PROSE = re.compile(r"(?=.*[^\W\d_]{4})[^\W\d_][\w\s,.'-]*")  # words, not a product of one-letter symbols
_FUNCTIONS = re.compile(r"\b(?:sqrt|sinh?|cosh?|tanh?|log|frac|infty|theta|alpha|beta|gamma)\b")


def same_answer(answer: str, reference: str) -> bool:
    """Whether two final answers (as extraction.extract_answer returns them) have the same value."""
    decided = equal_answers(answer, reference)
    if decided is not None:
        return decided
    ours, gold = clean(answer), clean(reference)
    if ours.casefold().strip("().") == gold.casefold().strip("()."):
        return True
    if any(len(text) > _MAX_CHARACTERS or _depth(text) > _MAX_DEPTH or _is_prose(text) for text in (ours, gold)):
        return False
    return _verify(gold=reference.strip(), answer=answer.strip())


def _is_prose(text: str) -> bool:
    return "\\" not in text and _PROSE.fullmatch(text) is not None and not _FUNCTIONS.search(text)


def _depth(text: str) -> int:
    """How deep brackets are nested."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _verify(*, gold: str, answer: str) -> bool:
    from math_verify import verify  # here, because importing sympy takes a second that plain answers need not pay

    parsed_gold, parsed_answer = _parse(gold), _parse(answer)
    if not parsed_gold or not parsed_answer:
        return False
    if "%" not in gold + answer and _differ(parsed_gold[0], parsed_answer[0]):
        return False
    return bool(verify(list(parsed_gold), list(parsed_answer), float_rounding=4, timeout_seconds=None))


def _differ(gold: Any, answer: Any) -> bool:
    """Whether two expressions have plainly different values at one point.

    Wrong answers are the usual case in training, and simplifying them is what algebra is slowest at. Relations, sets,
    tuples and everything that has no number there are left to the full comparison.
    """
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
    both: list[Any] = [gold, answer]
    names = sorted({symbol.name.lower() for one in both for symbol in one.free_symbols})
    if len(names) > _MAX_SYMBOLS:
        return False
    point = {name: 0.7391 + 0.3137 * i for i, name in enumerate(names)}
    try:
        values = [complex(one.subs({s: point[s.name.lower()] for s in one.free_symbols}).evalf()) for one in both]
    except (TypeError, ValueError, OverflowError, AttributeError, NotImplementedError):
        return False
    return abs(values[0] - values[1]) > 0.01 * max(abs(values[0]), abs(values[1]))


@lru_cache(maxsize=4096)
def _parse(text: str) -> tuple[Any, ...]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    _quiet()
    inner = text.strip("$").strip()
    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    return tuple(parse(f"\\boxed{{{inner}}}", targets, parsing_timeout=0)) or tuple(
        parse(inner, targets, parsing_timeout=0)
    )


@lru_cache(maxsize=1)
def _quiet() -> None:
    """math-verify warns that its own time limit is off; ours replaces it."""
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
