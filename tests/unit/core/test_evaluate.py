"""pass@k against the definition: the share of k-subsets with at least one pass."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from covey.evaluate import pass_at_k, summarize_evaluation
from covey.rewards.runner import Scores
from covey.types import Group, Prompt, Response


@pytest.mark.parametrize(("n", "c", "k"), [(4, 0, 2), (4, 1, 2), (5, 2, 3), (5, 4, 2), (6, 6, 1), (3, 3, 3)])
def test_pass_at_k_counts_subsets(n: int, c: int, k: int) -> None:
    outcomes = [True] * c + [False] * (n - c)
    subsets = list(combinations(outcomes, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def _groups() -> list[Group]:
    lengths = [[2, 4], [6, 8]]
    return [
        Group(
            Prompt(i, [1], "p"),
            [Response([0] * n, [0.0] * n, finish_reason="length" if n == 8 else "stop") for n in row],
        )
        for i, row in enumerate(lengths)
    ]


def _scores() -> Scores:
    total = np.array([[1.0, 0.5], [np.nan, 0.5]])
    details = {"math/answer": np.array([[1.0, 1.0], [0.0, 1.0]])}
    return Scores(total=total, parts={"math": total}, details=details, weights={}, counts={})


def test_summary_of_an_evaluation() -> None:
    values = summarize_evaluation(_groups(), _scores(), threshold=1.0)
    assert values["eval/pass@1"] == pytest.approx(0.25)  # one of four; the unscored one does not pass
    assert values["eval/pass@2"] == pytest.approx(0.5)
    assert values["eval/reward"] == pytest.approx(2.0 / 3)
    assert values["eval/response_length/mean"] == 5
    assert values["eval/truncated_share"] == 0.25


def test_a_part_can_decide_what_passes() -> None:
    values = summarize_evaluation(_groups(), _scores(), threshold=1.0, pass_on="math/answer")
    assert values["eval/pass@1"] == pytest.approx(0.75)


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(ValueError, match="known: math, math/answer"):
        summarize_evaluation(_groups(), _scores(), threshold=1.0, pass_on="maths")
