r"""The built-in math reward."""

from __future__ import annotations

import pytest

from covey.rewards.math_answer import answer_reward, math_reward, reasoning_of

SEED_ROW = {
    "problem": "计算圆的面积，给定半径为5",
    "response": "<think>圆的面积公式是πr²</think><answer>\\boxed{78.54}</answer>",
    "task": "math",
}


def score(text: str, reference: object = "4", **options: object) -> dict[str, float]:
    value = math_reward([text], [{"response": reference}], options)[0]
    assert isinstance(value, dict)
    return value


def test_parts_are_weighted_as_the_seed_splits_them() -> None:
    good = score("<think>We add. The sum of both: 2+2=4. That is all there is.</think><answer>\\boxed{4}</answer>")
    assert (good["format"], good["reasoning"], good["answer"]) == (1.0, 1.0, 1.0)
    assert good["score"] == pytest.approx(1.0)
    wrong = score("<think>We add. The sum of both: 2+2=4. That is all there is.</think><answer>\\boxed{5}</answer>")
    assert wrong["score"] == pytest.approx(0.3 + 0.4)
    bare = score("\\boxed{4}")
    assert (bare["format"], bare["answer"]) == (0.0, 1.0)
    assert bare["score"] == pytest.approx(0.4 * bare["reasoning"] + 0.3)


def test_weights_choose_the_parts() -> None:
    text = "<think>2+2=4</think><answer>\\boxed{4}</answer>"
    assert score(text, weights={"format": 0.25, "answer": 0.5})["score"] == 0.75
    assert score(text, weights={"reasoning": 1.0})["score"] == pytest.approx((1 / 3 + 1) / 2)
    wrong = score("<think></think><answer>5</answer>", weights={"answer": 1.0})
    assert (wrong["score"], wrong["format"]) == (0.0, 1.0)


def test_parts_of_the_reasoning_are_shown() -> None:
    parts = score("<think>2+2=4 and 2+3=6</think><answer>4</answer>")
    assert parts["reasoning_arithmetic"] == 0.5
    assert {"reasoning_steps", "reasoning_repetition", "reasoning_length"} < parts.keys()


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ("<think>a</think><answer>b</answer>", "a"),
        ("a</think><answer>b</answer>", "a"),
        ("a <answer>b</answer>", "a"),
        ("a, so 4", "a, so 4"),
        ("<think>a <answer>b</answer>", "a"),
    ],
)
def test_reasoning_is_what_stands_before_the_answer(text: str, reasoning: str) -> None:
    assert reasoning_of(text).strip() == reasoning


def test_answer_alone() -> None:
    row = {"response": "<think>x</think><answer>\\boxed{\\frac{1}{2}}</answer>"}
    assert answer_reward(["so 0.5: \\boxed{0.5}", "\\boxed{2}", "none"], [row] * 3, {}) == [1.0, 0.0, 0.0]


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
