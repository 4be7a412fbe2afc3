r"""MindSpeed-RL's verifiers: names and scores."""

from __future__ import annotations

import pytest

from covey.rewards.base import load_reward

GOOD = "<think>Step 1: add.\nStep 2: check.\nFinally, done.</think><answer>\\boxed{34}</answer>"
WRONG = GOOD.replace("34", "35")
BARE = "it is \\boxed{34}"
NONE = "it is 34"
LOOSE = "<think>a</think> so <answer>we get \\boxed{34} here</answer>"
TWICE = GOOD.replace("<answer>", "<answer><answer>")


def score(name: str, text: str, label: str = "34") -> float:
    value = load_reward(name)([text], [{"response": label}], {})[0]
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize(
    ("name", "scores"),  # of GOOD, WRONG, BARE, NONE, LOOSE, TWICE
    [
        ("acc", [1.0, -0.5, 1.0, -1.0, 1.0, 1.0]),
        ("format", [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]),
        ("strict_format", [1.0, 1.0, -0.5, -0.5, 1.0, -0.5]),
        ("base_acc", [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]),
        ("math_verify_reward", [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]),
        ("math_17k_acc", [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]),
        ("acc_for_ppo", [1.0, 0.0, 1.0, 0.0, 1.0, 1.0]),
        ("step", [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]),
    ],
)
def test_scores(name: str, scores: list[float]) -> None:
    assert [score(name, text) for text in (GOOD, WRONG, BARE, NONE, LOOSE, TWICE)] == scores


@pytest.mark.parametrize("name", ["acc", "base_acc", "math_17k_acc", "acc_for_ppo"])
def test_label_of_the_seed_is_extracted(name: str) -> None:
    tagged = "<think>圆的面积公式是πr²</think><answer>\\boxed{78.54}</answer>"
    assert score(name, tagged, tagged) == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Answer: 34", 1.0),
        ("answer : $34$.", 1.0),
        ("Answer: \\boxed{34}", 1.0),
        ("Answer: 35", -1.0),
        ("Answer: 35\nAnswer: 34", 1.0),
        ("\\boxed{34}", -1.0),
        ("Answer: 34" + " " * 300, -1.0),
        ("", -1.0),
    ],
)
def test_dapo_reads_the_last_answer_line_near_the_end(text: str, expected: float) -> None:
    assert score("acc_for_dapo", text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0.0),
        ("Step 1: a", 1 / 3),
        ("1. a\n2. b", 2 / 3),
        ("- a\n- b\n* c\n- d", 1.0),
        ("First, a. Next, b.", 2 / 3),
    ],
)
def test_step_counts_markers_up_to_three(text: str, expected: float) -> None:
    assert score("step", text) == pytest.approx(expected)
