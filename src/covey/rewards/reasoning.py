r"""How well a reasoning text is made, in [0, 1]: four parts that can be read off the text, no model involved.

    quality = repetition * length * (steps + arithmetic) / 2

steps       distinct steps, up to `num_steps`: lines or sentences that say something no earlier one said
arithmetic  share of the equations between written numbers that hold ("12 * 7 = 84"); 0.5 when there is none to check
repetition  share of distinct 4-grams, over 0.8 (ordinary texts reach 1; a phrase said k times gets about 1 / k)
length      1 from `min_units` to `max_units`, falling linearly to 0 at no units and at twice `max_units`

A unit is a word, a number, one punctuation mark or one CJK character. The factors multiply, so a loop, an empty text
and an endless one are worth little whatever their steps say. What it cannot see: whether a step follows from the one
before, or belongs to the question.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from fractions import Fraction

_CJK = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_CJK_START = 0x2E80
_UNIT = re.compile(rf"[{_CJK}]|\d+(?:\.\d+)?|[^\W\d_{_CJK}]+|[^\w\s]")
_STEP_END = re.compile(r"\n|[!?。！？；;]|\.(?=\s|$)")
_ENUMERATOR = re.compile(r"(?i)^\s*(?:step\s*\d+\s*[:.)-]?|\(?\d+[.)]|[-*•]|第?\d+步[:：]?)\s*")
_CLAUSE_END = re.compile(r"\n|[,;](?=\s)|\.(?=\s|$)")
_ARITHMETIC = re.compile(r"[\d.,()+\-*/^=≈\s]+")
_OPERATORS = {r"\times": "*", r"\cdot": "*", r"\div": "/", "×": "*", "·": "*", "÷": "/", "−": "-", r"\approx": "≈"}  # noqa: RUF001
_NGRAM, _ORDINARY_DISTINCT = 4, 0.8
_MAX_SIDE, _MAX_EXPONENT, _MAX_BITS = 80, 64, 512


@dataclass(frozen=True)
class Quality:
    """The parts, each in [0, 1]. Example: Quality(steps=1.0, arithmetic=1.0, repetition=1.0, length=1.0).score is 1."""

    steps: float
    arithmetic: float
    repetition: float
    length: float

    @property
    def score(self) -> float:
        """The quality in [0, 1]."""
        return self.repetition * self.length * (self.steps + self.arithmetic) / 2


def reasoning_quality(text: str, *, num_steps: int = 3, min_units: int = 5, max_units: int = 2000) -> Quality:
    """The quality of a reasoning text (without its tags and without the final answer)."""
    units = _UNIT.findall(text.lower())
    checks = [holds for _, holds in arithmetic_checks(text)]
    return Quality(
        steps=min(1.0, count_steps(text) / num_steps),
        arithmetic=sum(checks) / len(checks) if checks else 0.5,
        repetition=_repetition(units),
        length=min(1.0, len(units) / min_units, max(0.0, 2.0 - len(units) / max_units)),
    )


def count_steps(text: str) -> int:
    """Lines and sentences of at least two units that use a word or number which no earlier one used."""
    seen: set[str] = set()
    count = 0
    for piece in _STEP_END.split(text):
        units = [u for u in _UNIT.findall(_ENUMERATOR.sub("", piece.lower())) if u.isalnum() or "." in u[1:]]
        if len(units) >= 2 and not seen.issuperset(units):
            count += 1
        seen.update(units)
    return count


def arithmetic_checks(text: str) -> list[tuple[str, bool]]:
    """Every distinct equation between written numbers in `text`, and whether it holds.

    `a = b = c` gives two equations. Both sides must be numbers joined by + - * / ^ and brackets, at least one of them
    with an operator. A decimal side holds when it is the other side rounded to its digits.
    """
    for spelling, plain in _OPERATORS.items():
        text = text.replace(spelling, plain)
    text = text.replace("$", " ").replace("≈", "=").replace("**", "^")
    checks: dict[str, bool] = {}
    for match in (m for piece in _CLAUSE_END.split(text) for m in _ARITHMETIC.finditer(piece) if "=" in m[0]):
        sides = [side.strip() for side in match[0].split("=")]
        if sides[0][:1] in ("+", "*", "/", "^") or _glued(match.string, match.start(), -1):
            sides[0] = ""  # `2x + 3 = 7`: the left side belongs to an expression with letters
        if _glued(match.string, match.end() - 1, 1):
            sides[-1] = ""
        sides[-1] = sides[-1].rstrip(" +-*/.(,")
        for left, right in zip(sides, sides[1:], strict=False):
            values = _evaluate(left), _evaluate(right)
            if None not in values and re.search(r"[+\-*/^]", left[1:] + " " + right[1:]) and left != right:
                checks[f"{left}={right}"] = _agree(left, right, *values)  # type: ignore[arg-type]
    return list(checks.items())


def _glued(text: str, edge: int, direction: int) -> bool:
    """Whether the number that ends at `edge` touches a letter or TeX (`5x`, `_3`), being part of something else."""
    beside = edge + direction
    if text[edge].isspace() or not 0 <= beside < len(text):
        return False
    return (text[beside].isalpha() and ord(text[beside]) < _CJK_START) or text[beside] in "\\{}_%"


def _agree(left: str, right: str, left_value: Fraction, right_value: Fraction) -> bool:
    if left_value == right_value:
        return True
    decimals = [len(side.partition(".")[2]) for side in (left, right) if re.fullmatch(r"-?[\d,]*\.\d+", side)]
    return bool(decimals) and 2 * abs(left_value - right_value) * 10 ** max(decimals) <= 1


def _evaluate(side: str) -> Fraction | None:
    """The value of an arithmetic expression, exactly; None when it is not one, or too large to be worth it."""
    side = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", side).strip()
    side = re.sub(r"(?<![\d.])0+(?=\d)", "", side)  # 007 is no Python number
    if not side or len(side) > _MAX_SIDE or not re.fullmatch(r"[\d.()+\-*/^\s]+", side):
        return None
    try:
        return _value(ast.parse(side.replace("^", "**"), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, OverflowError, ValueError):
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if not isinstance(node, ast.BinOp):
        raise ValueError("not arithmetic")
    left, right = _value(node.left), _value(node.right)
    if isinstance(node.op, ast.Pow):
        if right.denominator != 1 or abs(right) > _MAX_EXPONENT:
            raise ValueError("exponent out of range")
        result = Fraction(left**right.numerator)
    elif isinstance(node.op, ast.Div):
        result = left / right
    elif isinstance(node.op, (ast.Add, ast.Sub, ast.Mult)):
        result = {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[type(node.op)]
    else:
        raise ValueError("not arithmetic")
    if max(result.numerator.bit_length(), result.denominator.bit_length()) > _MAX_BITS:
        raise ValueError("number out of range")
    return result


def _repetition(units: list[str]) -> float:
    """Share of distinct 4-grams over what ordinary texts have, at most 1; 1 for texts shorter than one 4-gram."""
    ngrams = [tuple(units[i : i + _NGRAM]) for i in range(len(units) - _NGRAM + 1)]
    return min(1.0, len(set(ngrams)) / len(ngrams) / _ORDINARY_DISTINCT) if ngrams else 1.0
