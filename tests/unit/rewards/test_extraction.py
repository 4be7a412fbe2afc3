r"""Final answers found in texts."""

from __future__ import annotations

import pytest

from covey.rewards.extraction import braces_pair_up, extract_answer, extract_reference, last_boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{\frac{1}{2}} holds", r"\frac{1}{2}"),
        (r"\boxed{\text{a} {b {c}}}", r"\text{a} {b {c}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"first \boxed{1}, corrected \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2", "1"),  # the last one does not close
        (r"\fbox{7}", "7"),
        (r"\boxed 7$ is", "7"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{}", None),
        (r"$\boxed{1}$ and $\boxed{-2}$.", "1, -2"),
        (r"\boxed{1},\boxed{2}, \boxed{3}", "1, 2, 3"),
        (r"\boxed{1} \quad \text{ or } \quad \boxed{2}", "1, 2"),
        (r"\boxed{1} no no no \boxed{2}", "2"),
        ("<think>it is 5, \\boxed{5}</think><answer>6</answer>", "6"),
        ("<think>x</think><answer> The value is \\boxed{6}. </answer>", "6"),
        ("<answer>1</answer> or <answer>2</answer>", "2"),
        ("<answer></answer>", None),
        ("1 + 2 = 3\n#### 3", "3"),
        ("Answer: 42.", "42"),
        ("**Answer:** $\\frac12$.", "\\frac12"),
        ("The final answer is: 17", "17"),
        ("the answer is 3.5.\n", "3.5"),
        ("no idea", None),
        ("", None),
    ],
)
def test_final_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_reference_may_be_tagged_or_bare() -> None:
    assert extract_reference("<think>圆的面积公式是πr²</think><answer>\\boxed{78.54}</answer>") == "78.54"
    assert extract_reference("9 - 2 = 7\n#### 7") == "7"
    assert extract_reference(" 78.54 ") == "78.54"
    assert extract_reference(12) == "12"


def test_literal_braces_do_not_end_a_box() -> None:
    assert last_boxed(r"\boxed{a \} b}") == r"a \} b"
    assert last_boxed("\\boxed{") is None


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("", True),
        (r"\boxed{18}", True),
        (r"\boxed{18}}}", False),
        (r"\boxed{18", False),
        ("}{", False),
        (r"\{ {1} \}", True),
        (r"\\{1}", True),  # a line break, then a group
        ("{{a}\n{b}}", True),
    ],
)
def test_braces_pair_up(text: str, pair: bool) -> None:
    assert braces_pair_up(text) is pair
