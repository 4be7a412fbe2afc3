"""The scores of a step, and the numbers that are reported about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from covey.rewards.execute import FunctionSpec, Outcome

_COUNT = {"none": "none", "error": "errors", "timeout": "timeouts"}


@dataclass
class Scores:
    """Rewards of a step: P groups of G responses (G the largest group; a smaller group's tail is NaN)."""

    total: np.ndarray  # (P, G) float64, the weighted sum; NaN: unscored
    parts: dict[str, np.ndarray] = field(default_factory=dict)  # function -> (P, G) score, unweighted; NaN: none
    details: dict[str, np.ndarray] = field(default_factory=dict)  # "function/part" -> (P, G), parts it returned
    weights: dict[str, np.ndarray] = field(default_factory=dict)  # function -> (P,) weight; 0: not for this row
    counts: dict[str, int] = field(default_factory=dict)  # errors, timeouts, none, and each as "FUNCTION/errors" ...
    tasks: list[str] = field(default_factory=list)  # (P,) task of each row; "" without one
    ranges: list[tuple[float, float]] = field(default_factory=list)  # (P,) lowest and highest possible total

    @classmethod
    def empty(cls, num_groups: int, group_size: int) -> Scores:
        """Scores in which nothing is scored yet."""
        return cls(np.full((num_groups, group_size), math.nan), counts={"errors": 0, "timeouts": 0, "none": 0})

    @classmethod
    def concat(cls, parts: Sequence[Scores]) -> Scores:
        """The groups of several parts one after another; a function that one of them lacks scored nothing there."""
        num_groups = sum(part.total.shape[0] for part in parts)
        whole = cls.empty(num_groups, max(part.total.shape[1] for part in parts))
        whole.counts, row = {}, 0
        for part in parts:
            rows, columns = slice(row, row + part.total.shape[0]), slice(0, part.total.shape[1])
            whole.total[rows, columns] = part.total
            for mine, its in ((whole.parts, part.parts), (whole.details, part.details)):
                for name, cells in its.items():
                    mine.setdefault(name, np.full(whole.total.shape, math.nan))[rows, columns] = cells
            for name, weights in part.weights.items():
                whole.weights.setdefault(name, np.zeros(num_groups))[rows] = weights
            for name, count in part.counts.items():
                whole.counts[name] = whole.counts.get(name, 0) + count
            whole.tasks += part.tasks
            whole.ranges += part.ranges
            row = rows.stop
        return whole

    def add_group(self, row: int, specs: list[FunctionSpec], outcomes: list[list[Outcome]], num_responses: int) -> None:
        """Enter what `specs` gave for the responses of group `row`: outcomes[function][response]."""
        low = high = 0.0
        totals, scored = np.zeros(num_responses), np.zeros(num_responses, dtype=bool)
        failed = np.zeros(num_responses, dtype=bool)
        for spec, of_function in zip(specs, outcomes, strict=True):
            cells = self.parts.setdefault(spec.label, np.full(self.total.shape, math.nan))
            self.weights.setdefault(spec.label, np.zeros(self.total.shape[0]))[row] += spec.weight
            bounds = sorted(spec.weight * bound for bound in spec.range)
            low, high = low + bounds[0], high + bounds[1]
            for column, outcome in enumerate(of_function):
                if outcome.status != "ok":
                    self._count(spec.label, _COUNT[outcome.status])
                    failed[column] |= outcome.status != "none"
                    continue
                assert outcome.score is not None
                cells[row, column] = outcome.score
                totals[column] += spec.weight * outcome.score
                scored[column] = True
                for part, value in outcome.parts.items():
                    name = f"{spec.label}/{part}"
                    self.details.setdefault(name, np.full(self.total.shape, math.nan))[row, column] = value
        self.total[row, :num_responses] = np.where(scored & ~failed, totals, math.nan)
        self.ranges.append((low, high))

    def summary(self) -> dict[str, float]:
        """Numbers to report besides the total: of every function, every part of it, every task.

        FUNCTION_rewards/{mean,std}, FUNCTION_rewards/{none,errors,timeouts} (counts), FUNCTION_rewards/PART (mean), and
        with more than one task task/TASK/{reward,std,unscored_share}. A mean over nothing is left out.
        """
        values: dict[str, float] = {}
        for name, cells in self.parts.items():
            known = cells[~np.isnan(cells)]
            if known.size:
                values[f"{name}_rewards/mean"] = float(known.mean())
                values[f"{name}_rewards/std"] = float(known.std(ddof=1)) if known.size > 1 else 0.0
            for kind in _COUNT.values():
                values[f"{name}_rewards/{kind}"] = float(self.counts.get(f"{name}/{kind}", 0))
        for name, cells in self.details.items():
            function, _, part = name.rpartition("/")
            values[f"{function}_rewards/{part}"] = float(np.nanmean(cells))
        if len(set(self.tasks)) > 1:
            for task in dict.fromkeys(self.tasks):
                rewards = self.total[[i for i, name in enumerate(self.tasks) if name == task]]
                known = rewards[~np.isnan(rewards)]
                if known.size:
                    values[f"task/{task}/reward"] = float(known.mean())
                    values[f"task/{task}/std"] = float(known.std(ddof=1)) if known.size > 1 else 0.0
                values[f"task/{task}/unscored_share"] = float(np.isnan(rewards).mean())
        return values

    def _count(self, label: str, kind: str) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.counts[f"{label}/{kind}"] = self.counts.get(f"{label}/{kind}", 0) + 1
