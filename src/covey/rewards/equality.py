r"""Are two final answers the same number or text? The cheap half: no computer algebra.

Numbers written out (`78.54`, `1,000`, `3/4`, `50\%`) are compared exactly, as fractions, with one tolerance: a decimal
stands for what rounds to it at its digits, but never further away than FINER of the reference, or COARSER when the
answer states fewer digits than the reference. So 78.5398 = 78.54 and 0.3333 = 1/3, but 12345 != 12346,
78.5 != 78.54 and 0.54 != 0.5.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

FINER, COARSER = Fraction(1, 1000), Fraction(1, 10000)  # relative to the reference
_MAX_DIGITS = 400  # longer literals are compared as text: a power of ten is not worth a stall

_NUMBER = re.compile(r"([-+]?)(\d+(?:\.\d*)?|\.\d+)(?:[eE]([-+]?\d{1,3}))?")
_GROUPED = re.compile(r"[-+]?[1-9]\d{0,2}(?:(?:,|\{,\}| )\d{3})+(?:\.\d+)?")
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_FRACTION = re.compile(r"([-+]?)\s*(?:\\[dt]?frac\s*\{?([-+]?\d+)\}?\s*\{?(\d+)\}?|(\d+)\s*/\s*(\d+))")
_WRAPPERS = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}")
_NOISE = re.compile(r"\\left|\\right|\\[,;: ]|\\displaystyle|\\\$|[$°€£¥]|\^\{?\\circ\}?")


@dataclass(frozen=True)
class Number:
    """A written number. Example: "78.54" is Number(Fraction(3927, 50), decimals=2); "3/4" has decimals None."""

    value: Fraction
    decimals: int | None  # digits after the point; 0 for an integer; None for a fraction, which is exact
    percent: bool = False


def equal_answers(answer: str, reference: str) -> bool | None:
    """True or False where the cheap rules decide; None where they do not (algebra is needed)."""
    if answer.strip() == reference.strip():
        return True
    ours, gold = clean(answer), clean(reference)
    if ours == gold:
        return True
    left, right = read_number(ours), read_number(gold)
    if left is None or right is None:
        return None
    return equal_numbers(left, right)


def equal_numbers(answer: Number, reference: Number) -> bool:
    """Equality of two written numbers at the stated digits; `50%` equals both 50 and 0.5."""
    if answer.percent != reference.percent:
        plain = Number(answer.value, answer.decimals), Number(reference.value, reference.decimals)
        if equal_numbers(*plain):
            return True
        scaled = [
            Number(n.value / 100, None if n.decimals is None else n.decimals + 2) if n.percent else n
            for n in (answer, reference)
        ]
        return equal_numbers(Number(scaled[0].value, scaled[0].decimals), Number(scaled[1].value, scaled[1].decimals))
    difference = abs(answer.value - reference.value)
    if difference == 0:
        return True
    stated = [n.decimals for n in (answer, reference) if n.decimals is not None]
    if not stated or min(stated) == 0:
        return False
    coarser = answer.decimals is not None and (reference.decimals is None or answer.decimals < reference.decimals)
    tolerance = (COARSER if coarser else FINER) * abs(reference.value)
    return 2 * difference * 10 ** min(stated) <= 1 and difference <= tolerance


def clean(text: str) -> str:
    r"""Markup that does not change the value removed: `$`, `\left`, `\text{}`, spaces, a trailing full stop."""
    text = _WRAPPERS.sub(lambda m: m[1], text)
    text = _NOISE.sub(" ", text.replace("\\!", ""))
    return re.sub(r"\s+", " ", text).strip().rstrip(".").strip()


def read_number(text: str) -> Number | None:
    """The number that `text` writes out, or None when it is anything else. No unit, no expression."""
    percent = bool(re.search(r"\\?%$", text))
    text = re.sub(r"\\?%$", "", text).strip()
    if len(text) > _MAX_DIGITS:
        return None
    if _GROUPED.fullmatch(text):
        text = re.sub(r",|\{,\}| ", "", text)
    elif _DECIMAL_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    number = _NUMBER.fullmatch(text)
    if number:
        exponent = int(number[3] or 0)
        decimals = len(number[2].partition(".")[2]) - exponent
        return Number(Fraction(text.lstrip("+")), max(decimals, 0), percent)
    fraction = _FRACTION.fullmatch(text)
    if fraction:
        top, bottom = int(fraction[2] or fraction[4]), int(fraction[3] or fraction[5])
        return Number(Fraction(-top if fraction[1] == "-" else top, bottom), None, percent) if bottom else None
    return None
