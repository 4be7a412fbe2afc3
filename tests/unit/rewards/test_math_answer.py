r"""The built-in math reward."""

from __future__ import annotations

import pytest

from covey.rewards.math_answer import math_reward

SEED_ROW = {
    "problem": "计算圆的面积，给定半径为5",
    "response": "<think>圆的面积公式是πr²</think><answer>\\boxed{78.54}</answer>",
    "task": "math",
}


def score(text: str, reference: object = "4", **options: object) -> dict[str, float]:
    value = math_reward([text], [{"response": reference}], options)[0]
    assert isinstance(value, dict)
    return value


def test_form_and_answer_are_weighted() -> None:
    both = score("<think>2+2=4</think><answer>\\boxed{4}</answer>", weights={"format": 0.25, "answer": 0.5})
    assert both == {"score": 0.75, "format": 1.0, "answer": 1.0}
    form = score("<think>2+2=5</think><answer>\\boxed{5}</answer>", weights={"format": 0.25, "answer": 0.5})
    assert form == {"score": 0.25, "format": 1.0, "answer": 0.0}
    answer = score("\\boxed{4}", weights={"format": 0.25, "answer": 0.5})
    assert answer == {"score": 0.5, "format": 0.0, "answer": 1.0}


def test_part_without_weight_is_shown_and_counts_nothing() -> None:
    assert score("\\boxed{5}", weights={"answer": 1.0}) == {"score": 0.0, "format": 0.0, "answer": 0.0}
    assert score("<think></think><answer>5</answer>", weights={"answer": 1.0})["score"] == 0.0


def test_reference_of_the_seed_is_tagged_text() -> None:
    [right, wrong] = math_reward(
        ["\\boxed{78.5398}", "\\boxed{78.5}"], [SEED_ROW, SEED_ROW], {"weights": {"answer": 1}}
    )
    assert isinstance(right, dict)
    assert isinstance(wrong, dict)
    assert (right["score"], wrong["score"]) == (1.0, 0.0)


@pytest.mark.parametrize("reference", [None, "", "  "])
def test_row_without_reference_is_an_error(reference: object) -> None:
    with pytest.raises(ValueError, match="no reference answer in 'response'"):
        score("\\boxed{4}", reference)


def test_unknown_weight_names_the_parts() -> None:
    with pytest.raises(ValueError, match=r"'anser' is unknown: did you mean 'answer'"):
        score("x", weights={"anser": 1.0})
