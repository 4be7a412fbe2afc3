"""Dynamic sampling on rounds with known rewards."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from covey.rewards.scores import Scores
from covey.rollout.dynamic import sample_groups
from covey.types import Group, Prompt, Response

SPREAD, EQUAL = [0.0, 1.0], [1.0, 1.0]


def rounds_of(*rounds: list[list[float]]) -> Callable[[], tuple[list[Group], Scores]]:
    """A rollout that gives these rewards round by round; group uids count up."""
    remaining, uid = list(rounds), 0

    def rollout() -> tuple[list[Group], Scores]:
        nonlocal uid
        rewards = np.array(remaining.pop(0))
        groups = []
        for row in rewards:
            groups.append(Group(Prompt(uid, [1], ""), [Response([1], [0.0]) for _ in row]))
            uid += 1
        uids = np.array([group.prompt.uid for group in groups], dtype=np.float64)
        scores = Scores(
            rewards,
            parts={"r": rewards / 2},
            weights={"r": uids},
            counts={"errors": 1, "timeouts": 0, "none": 0},
            tasks=[f"task{group.prompt.uid}" for group in groups],
            ranges=[(0.0, float(group.prompt.uid)) for group in groups],
        )
        return groups, scores

    return rollout


@pytest.mark.parametrize(
    ("rounds", "max_rounds", "expected", "report"),
    [
        # one round is plain sampling, whatever came of it
        ([[EQUAL, SPREAD]], 1, [0, 1], {}),
        # enough spread at once
        ([[SPREAD, SPREAD]], 3, [0, 1], {"rounds": 1, "dropped_groups": 0, "filled_groups": 0}),
        # refilled, the surplus of the last round dropped
        ([[EQUAL, SPREAD], [SPREAD, SPREAD]], 3, [1, 2], {"rounds": 2, "dropped_groups": 2, "filled_groups": 0}),
        # rounds ran out: filled up with the first group without spread
        ([[EQUAL, EQUAL], [EQUAL, SPREAD]], 2, [0, 3], {"rounds": 2, "dropped_groups": 2, "filled_groups": 1}),
    ],
)
def test_groups_with_spread_are_kept_until_the_step_is_full(
    rounds: list[list[list[float]]], max_rounds: int, expected: list[int], report: dict[str, int]
) -> None:
    groups, scores, values = sample_groups(rounds_of(*rounds), max_rounds=max_rounds)
    flat = np.array([row for one in rounds for row in one])
    assert [group.prompt.uid for group in groups] == expected
    assert values == {f"rollout/{key}": value for key, value in report.items()}
    # every table of the scores belongs to the same groups
    assert np.array_equal(scores.total, flat[expected])
    assert np.array_equal(scores.parts["r"], flat[expected] / 2)
    assert scores.weights["r"].tolist() == expected
    assert scores.tasks == [f"task{i}" for i in expected]
    assert [high for _, high in scores.ranges] == expected
    assert scores.counts["errors"] == len(rounds)
