"""Dynamic sampling: replace groups whose rewards have no spread, which have no gradient, by further rollouts.

Source: DAPO, arXiv:2503.14476 sec. 3.2. Unlike there, a step always has its full number of groups: when the rounds are
used up, groups without spread fill it. Groups are kept in the order they were sampled; surplus ones are dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from covey.algorithm.advantages import groups_to_keep
from covey.rewards.scores import Scores
from covey.types import Group


def sample_groups(
    rollout: Callable[[], tuple[list[Group], Scores]],  # one round: P new prompts, sampled and scored
    *,
    max_rounds: int,
) -> tuple[list[Group], Scores, dict[str, float]]:
    """P groups and their scores out of at most `max_rounds` rounds, and what to report when there may be several."""
    groups, scores = rollout()
    if max_rounds == 1:
        return groups, scores, {}
    wanted, rounds = len(groups), 1
    while rounds < max_rounds and groups_to_keep(scores.total).sum() < wanted:
        more, their_scores = rollout()
        groups, scores, rounds = groups + more, Scores.concat([scores, their_scores]), rounds + 1
    spread = groups_to_keep(scores.total)
    # Stable: groups with spread first, then the others, each in the order of sampling.
    chosen = np.sort(np.argsort(~spread, kind="stable")[:wanted])
    report = {
        "rollout/rounds": float(rounds),
        "rollout/dropped_groups": float(len(groups) - wanted),
        "rollout/filled_groups": float(wanted - spread[chosen].sum()),
    }
    return [groups[i] for i in chosen], take(scores, chosen), report


def take(scores: Scores, rows: np.ndarray) -> Scores:
    """The scores of some groups. Counts stay those of all that was sampled."""
    return Scores(
        total=scores.total[rows],
        parts={name: cells[rows] for name, cells in scores.parts.items()},
        details={name: cells[rows] for name, cells in scores.details.items()},
        weights={name: cells[rows] for name, cells in scores.weights.items()},
        counts=dict(scores.counts),
        tasks=[scores.tasks[i] for i in rows] if scores.tasks else [],
        ranges=[scores.ranges[i] for i in rows] if scores.ranges else [],
    )
