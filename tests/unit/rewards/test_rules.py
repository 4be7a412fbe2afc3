"""The form of a response."""

from __future__ import annotations

import pytest

from covey.rewards.rules import (
    Tagged,
    format_reward,
    length_reward,
    overlong_reward,
    parse_tags,
    repetition_reward,
)

GOOD = "<think>1+1 is 2</think><answer>\\boxed{2}</answer>"
BRACES = [  # that pair up, are literal, or have no box around them
    GOOD.replace("{2}", "{\\frac{1}{2}}"),
    GOOD.replace("{2}", "{\\{1, 2\\}, x \\le \\}}"),
    GOOD.replace("is 2", "is {{2"),
    "<think>a program</think><answer>print('{')</answer>",
]


def score(text: str, **options: object) -> float:
    value = format_reward([text], [{}], options)[0]
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize("text", [GOOD, f"\n {GOOD}\n", "<think>\na\nb</think>\n\n<answer>c\n</answer>", *BRACES])
def test_expected_form_scores_one(text: str) -> None:
    assert score(text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\\boxed{2}",
        GOOD.replace("</answer>", ""),  # not closed
        GOOD.replace("</think>", ""),
        GOOD + GOOD,  # twice
        GOOD + "</answer>",
        "<answer>2</answer><think>why</think>",  # order
        "<think><answer>2</answer></think>",  # nested
        "So " + GOOD,  # text before
        GOOD + " Done.",  # text after
        "<think>a</think> hence <answer>2</answer>",  # text between
        GOOD.replace("<think>", "<Think>"),
        GOOD.replace("{2}", "{2}}}"),  # braces left over
        GOOD.replace("{2}", "{2"),
        GOOD.replace("{2}", "{2}}{"),
    ],
)
def test_any_other_form_scores_zero(text: str) -> None:
    assert score(text) == 0.0


def test_prompt_may_have_opened_the_reasoning() -> None:
    rest = GOOD.removeprefix("<think>")
    assert score(rest) == 0.0
    assert score(rest, think_opened=True) == 1.0
    assert score(GOOD, think_opened=True) == 0.0


def test_blocks_are_returned_without_white_space_around() -> None:
    assert parse_tags("<think> a </think><answer> b </answer>") == Tagged("a", "b")


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match="think_open"):
        format_reward(["x"], [{}], {"think_open": True})


def test_overlong_falls_linearly_in_the_buffer() -> None:
    rows = [{"num_tokens": n} for n in (0, 6, 7, 8, 10)]
    options = {"buffer": 4, "max_response_length": 10, "factor": 0.5}
    assert overlong_reward([""] * 5, rows, options) == [0.0, 0.0, -0.125, -0.25, -0.5]
    with pytest.raises(ValueError, match="buffer"):
        overlong_reward([], [], {"max_response_length": 10})


def test_length_is_a_plateau_with_slopes() -> None:
    rows = [{"num_tokens": n} for n in (0, 5, 10, 20, 30, 40, 50)]
    assert length_reward([""] * 7, rows, {"low": 10, "high": 20}) == [0.0, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    with pytest.raises(ValueError, match="low <= high"):
        length_reward([], [], {"low": 10, "high": 5})


def test_repetition_is_the_share_of_ngrams_said_before() -> None:
    texts = ["a b c", "a b c d e", "a a a a a a", "a b a b a b"]
    # bigrams: 2 of 2 distinct, 4 of 4, 1 of 5, 2 of 5
    scores = repetition_reward(texts, [{}] * 4, {"ngram": 2})
    assert scores == pytest.approx([0.0, 0.0, -0.8, -0.6])
    assert repetition_reward(["", "one"], [{}] * 2, {}) == [0.0, 0.0]
