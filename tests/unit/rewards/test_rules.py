"""The form of a response."""

from __future__ import annotations

import pytest

from covey.rewards.rules import Tagged, format_reward, parse_tags

GOOD = "<think>1+1 is 2</think><answer>\\boxed{2}</answer>"


def score(text: str, **options: object) -> float:
    value = format_reward([text], [{}], options)[0]
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize("text", [GOOD, f"\n {GOOD}\n", "<think>\na\nb</think>\n\n<answer>c\n</answer>"])
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
