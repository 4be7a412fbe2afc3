"""Many tasks in one run: which functions score a row, and a common scale for the rewards of different tasks.

What normalization does to the advantage (also in docs/rewards.md): with a group baseline that divides by the group's
standard deviation (`group_norm`), nothing, as shift and scale cancel within a group; with `group_center` and `rloo` it
scales a task's advantages; with baselines over the batch it also decides which tasks lie above the mean.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DEFAULT = "default"
Moments = dict[str, tuple[float, float, float]]  # task -> (count, sum, sum of squares)


@dataclass(frozen=True)
class Router:
    """Functions by task. Example: Router((0,), {"math": (1,), "default": ()}, "task") gives a math row (0, 1)."""

    always: tuple[int, ...]  # indices of functions that score every row
    by_task: Mapping[str, tuple[int, ...]]
    task_key: str

    def route(self, row: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
        """(task, indices of its functions); ValueError for a task without a route when there is no default."""
        task = str(row.get(self.task_key, "") if row.get(self.task_key) is not None else "")
        if not self.by_task:
            return task, self.always
        if task in self.by_task:
            return task, (*self.always, *self.by_task[task])
        if DEFAULT in self.by_task:
            return task or DEFAULT, (*self.always, *self.by_task[DEFAULT])
        what = f"{self.task_key}={task!r}" if task else f"no value in column {self.task_key!r} (has {sorted(row)})"
        raise ValueError(
            f"reward.tasks: a row has {what}; routed tasks: {', '.join(self.by_task)}. Add the task, or `default`"
        )

    def check(self, rows: Iterable[Mapping[str, Any]]) -> Counter[str]:
        """Rows per task; ValueError that counts the rows of every task without a route.

        A task column that no row has is an error too, even when `default` would catch them all.
        """
        counts: Counter[str] = Counter()
        columns: set[str] = set()
        lost: Counter[str] = Counter()
        first: ValueError | None = None
        for row in rows:
            columns.update(row)
            try:
                counts[self.route(row)[0]] += 1
            except ValueError as error:
                first = first or error
                lost[str(row.get(self.task_key))] += 1
        if first is not None:
            raise ValueError(f"{first} (rows without a route: {', '.join(f'{n} of {t}' for t, n in lost.items())})")
        if counts and set(self.by_task) - {DEFAULT} and self.task_key not in columns:
            near = difflib.get_close_matches(self.task_key, columns, n=1)
            raise ValueError(
                f"reward.task_key={self.task_key!r}: no row has that column"
                f"{f', did you mean {near[0]!r}' if near else ''}; columns: {', '.join(sorted(columns))}"
            )
        return counts


@dataclass
class RunningScale:
    """Mean and standard deviation of each task's rewards over the run, for normalization `zscore`."""

    moments: Moments = field(default_factory=dict)

    def update(self, moments: Moments) -> None:
        """Add the rewards of a step."""
        for task, new in moments.items():
            old = self.moments.get(task, (0.0, 0.0, 0.0))
            self.moments[task] = (old[0] + new[0], old[1] + new[1], old[2] + new[2])

    def scale(self, task: str) -> tuple[float, float]:
        """(mean, standard deviation) of the task so far; deviation 1 while all its rewards were equal."""
        count, total, squares = self.moments.get(task, (0.0, 0.0, 0.0))
        if count == 0:
            return 0.0, 1.0
        variance = squares / count - (total / count) ** 2
        return total / count, math.sqrt(variance) if variance > 1e-12 * max(1.0, squares / count) else 1.0


def step_moments(rewards: np.ndarray, tasks: Sequence[str]) -> Moments:
    """Count, sum and sum of squares of each task's rewards; `rewards` (P, G), NaN left out; one task per row."""
    moments: Moments = {}
    for task, row in zip(tasks, rewards, strict=True):
        known = row[~np.isnan(row)]
        old = moments.get(task, (0.0, 0.0, 0.0))
        moments[task] = (old[0] + known.size, old[1] + float(known.sum()), old[2] + float((known**2).sum()))
    return moments


def zscore(rewards: np.ndarray, tasks: Sequence[str], scale: RunningScale) -> np.ndarray:
    """(P, G) rewards less their task's running mean, over its running deviation; this step counts in both.

    `rewards` are those of all devices, so that every device keeps the same scale.
    """
    scale.update(step_moments(rewards, tasks))
    shift = np.array([scale.scale(task) for task in tasks]).reshape(-1, 2)
    return (rewards - shift[:, :1]) / shift[:, 1:]


def to_range(rewards: np.ndarray, ranges: Sequence[tuple[float, float]]) -> np.ndarray:
    """(P, G) rewards with the lowest possible at 0 and the highest at 1; `ranges` gives both for each row."""
    bounds = np.array(ranges, dtype=np.float64).reshape(-1, 2)
    width = bounds[:, 1:] - bounds[:, :1]
    return (rewards - bounds[:, :1]) / np.where(width > 0, width, 1.0)
