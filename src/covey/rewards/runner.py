"""Score the responses of a step: which functions apply, their weighted sum, what failed.

`submit` takes a group as soon as its rollout is finished; `collect` returns the scores of all submitted groups.
A function that failed on a response (error, timeout) leaves that response unscored (NaN), because the sum of the
other functions would be a lower reward than the response may deserve. A None of a function is different: the function
does not apply, and the others make the reward.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from covey.config.schema import RewardConfig
from covey.rewards.base import load_reward
from covey.rewards.execute import FunctionSpec, Outcome, call
from covey.types import Group

log = logging.getLogger(__name__)


class RewardError(RuntimeError):
    """A reward function failed and reward.on_error is `raise`."""


@dataclass
class Scores:
    """Rewards of a step: P groups of G responses (G the largest group; a smaller group's tail is NaN)."""

    total: np.ndarray  # (P, G) float64, the weighted sum; NaN: unscored
    parts: dict[str, np.ndarray]  # function -> (P, G) its own score, unweighted; NaN: not scored by it
    details: dict[str, np.ndarray]  # "function/part" -> (P, G), the named parts a function returned
    weights: dict[str, np.ndarray]  # function -> (P,) its weight for the group's row; 0 where it is not routed
    counts: dict[str, int]  # "errors", "timeouts", "none" over all functions, and each as "FUNCTION/errors" ...


class Scorer:
    """The reward functions of a run."""

    def __init__(self, config: RewardConfig, *, max_response_length: int | None = None) -> None:
        """Load every function; ValueError for an unknown name, module or option."""
        self.max_response_length = max_response_length
        self._on_error = config.on_error
        self._specs = [FunctionSpec(e.name, e.name, e.weight, dict(e.options)) for e in config.functions]
        self._functions = [load_reward(spec.name) for spec in self._specs]
        self._pending: dict[int, tuple[Group, list[list[Outcome]]]] = {}
        self._logged: set[tuple[str, str]] = set()

    def score(self, groups: list[Group]) -> Scores:
        """Scores of `groups`, in their order."""
        for index, group in enumerate(groups):
            self.submit(index, group)
        return self.collect()

    def submit(self, index: int, group: Group) -> None:
        """Start scoring `group`, which becomes row `index` of the next collect()."""
        if index in self._pending:
            raise ValueError(f"group {index} was already submitted")
        responses = [response.text for response in group.responses]
        rows = [dict(group.prompt.row) for _ in responses]
        outcomes = [
            call(fn, list(responses), rows, dict(spec.options))
            for spec, fn in zip(self._specs, self._functions, strict=True)
        ]
        self._pending[index] = (group, outcomes)

    def collect(self) -> Scores:
        """Scores of the groups submitted since the last collect, by ascending index; waits for the unfinished."""
        pending, self._pending = [self._pending[index] for index in sorted(self._pending)], {}
        shape = (len(pending), max((len(group.responses) for group, _ in pending), default=0))
        scores = Scores(np.full(shape, math.nan), {}, {}, {}, {"errors": 0, "timeouts": 0, "none": 0})
        for row, (group, outcomes) in enumerate(pending):
            for column in range(len(group.responses)):
                per_function = [of_function[column] for of_function in outcomes]
                self._fill(scores, row, column, per_function)
        return scores

    def close(self) -> None:
        """Release the workers."""

    def _fill(self, scores: Scores, row: int, column: int, outcomes: list[Outcome]) -> None:
        counts, total, failed, scored = Counter(scores.counts), 0.0, False, False
        for spec, outcome in zip(self._specs, outcomes, strict=True):
            cell = scores.parts.setdefault(spec.label, np.full(scores.total.shape, math.nan))
            scores.weights.setdefault(spec.label, np.zeros(scores.total.shape[0]))[row] = spec.weight
            if outcome.status != "ok":
                key = {"none": "none", "error": "errors", "timeout": "timeouts"}[outcome.status]
                counts[key] += 1
                counts[f"{spec.label}/{key}"] += 1
                failed = failed or outcome.status != "none"
                self._report(spec, outcome)
                continue
            assert outcome.score is not None
            cell[row, column] = outcome.score
            total, scored = total + spec.weight * outcome.score, True
            for part, value in outcome.parts.items():
                name = f"{spec.label}/{part}"
                scores.details.setdefault(name, np.full(scores.total.shape, math.nan))[row, column] = value
        if scored and not failed:
            scores.total[row, column] = total
        scores.counts = dict(counts)

    def _report(self, spec: FunctionSpec, outcome: Outcome) -> None:
        if outcome.status == "none":
            return
        message = f"reward {spec.label!r}: {outcome.status} ({outcome.error})\n{outcome.detail}"
        if self._on_error == "raise":
            raise RewardError(message)
        if (spec.label, outcome.error) not in self._logged:
            self._logged.add((spec.label, outcome.error))
            log.warning("%s(further ones of this kind are only counted)", message)
