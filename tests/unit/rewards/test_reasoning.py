"""The quality of a reasoning text."""

from __future__ import annotations

import time

import pytest

from covey.rewards.reasoning import arithmetic_checks, count_steps, reasoning_quality

GOOD = "We need the area. The radius is 5, so r^2 = 25.\nThen 3.1416 * 25 = 78.54."


def test_sound_text_reaches_one() -> None:
    assert reasoning_quality(GOOD).score == 1.0


def test_quality_is_the_documented_product_of_its_parts() -> None:
    quality = reasoning_quality("two and two make four: 2+2=4, then 4+4=9")
    assert (quality.steps, quality.arithmetic, quality.repetition, quality.length) == (1 / 3, 0.5, 1.0, 1.0)
    assert quality.score == pytest.approx((1 / 3 + 0.5) / 2)


@pytest.mark.parametrize(
    "phrase",
    [
        "Let me think. ",
        "Step 1: we compute. ",
        "1+1=2. ",
        "so the answer is 4\n",
        "hmm ",
        "首先我们计算。",
        "First, a. Second, b. Third, c. ",
        "2 + 2 = 4 because 4 = 2 + 2. ",
        "a",
        "!",
    ],
)
@pytest.mark.parametrize("times", [30, 300])
def test_a_repeated_phrase_is_worth_little(phrase: str, times: int) -> None:
    assert reasoning_quality(phrase * times).score < 0.1
    assert reasoning_quality(phrase * times).score < reasoning_quality(GOOD).score


def test_repeating_a_good_text_only_lowers_its_worth() -> None:
    scores = [reasoning_quality((GOOD + "\n") * times).score for times in (1, 2, 4, 8)]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] < 0.2


def test_a_counter_in_the_loop_does_not_help() -> None:
    text = "".join(f"Step {i}: we continue to compute the value. " for i in range(200))
    assert count_steps(text) == 1
    assert reasoning_quality(text).score < 0.5


def test_empty_and_endless_texts_are_worth_nothing() -> None:
    assert reasoning_quality("").score == 0.0
    assert reasoning_quality(" ".join(f"w{i}x" for i in range(3000)), max_units=1000).score == 0.0
    half = reasoning_quality(" ".join(chr(97 + i % 26) * (i // 26 + 1) for i in range(1500)), max_units=1000)
    assert half.length == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "checks"),
    [
        ("3+4=7", [True]),
        ("so 3 + 4 = 8 apples", [False]),
        ("12 \\times 7 = 84", [True]),
        ("$12 \\cdot 7 = 85$", [False]),
        ("10/3 ≈ 3.33", [True]),
        ("10/3 = 3.34", [False]),
        ("2+3*4 = 2+12 = 14", [True, True]),
        ("2+3*4 = 5*4 = 20", [False, True]),
        ("x = 5+5 = 10", [True]),
        ("2^10 = 1024", [True]),
        ("1,000 + 1 = 1,001", [True]),
        ("0.1 + 0.2 = 0.3", [True]),  # false in floating point
        ("3+4=7. 3+4=7. 3+4=7.", [True]),  # one equation
        ("-3 + 5 = 2", [True]),
        ("得3*4=12。", [True]),
        # nothing to check
        ("2x + 3 = 7", []),
        ("x^2 = 25", []),
        ("f(3) = 9", []),
        ("7 = 7", []),
        ("sin 30 = 0.5", []),
        ("1/0 = 1", []),
        ("3+4=7x", []),
        ("no numbers", []),
    ],
)
def test_equations_between_numbers_are_checked(text: str, checks: list[bool]) -> None:
    assert [holds for _, holds in arithmetic_checks(text)] == checks


@pytest.mark.parametrize(
    "text", ["9^9^9^9=1", "9" * 5000 + "+1=2", "(" * 5000 + "1=1", "1+" * 5000 + "1=2", "2^64^64=1"]
)
def test_hostile_arithmetic_is_bounded(text: str) -> None:
    begin = time.perf_counter()
    reasoning_quality(text)
    assert time.perf_counter() - begin < 1.0


def test_only_lines_that_add_something_are_steps() -> None:
    assert count_steps("We add the numbers.\nWe add the numbers.\nThe sum is 7.") == 2
    assert count_steps("1. add numbers\n2. add numbers\n3. add numbers") == 1
    assert count_steps("ok\nyes\n\n") == 0
