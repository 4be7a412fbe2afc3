"""The second half of a training step: from a scored rollout to the update. `covey replay` runs it from records.

scores -> one scale over tasks -> old and reference log-probabilities -> advantages -> epochs x mini-batches
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from covey.config.schema import Config
from covey.credit import advantages_of
from covey.optim import Optimizer, learning_rate
from covey.policy import Policy
from covey.rewards.runner import Scorer
from covey.rewards.scores import Scores
from covey.types import Group, StepBatch, StepStats


@dataclass
class Learner:
    """The parts of a run that an update needs. It has no state of its own: what changes is in the parts."""

    config: Config
    policy: Policy
    ref: Policy | None  # the frozen reference; None without a KL term
    scorer: Scorer  # for the scale of its rewards
    optimizer: Optimizer

    @property
    def total_optimizer_steps(self) -> int:
        """Optimizer steps of the whole run, from which the learning rate follows."""
        config = self.config
        mini = config.algorithm.mini_batch_size or config.train.batch_size
        return config.train.steps * config.algorithm.epochs * (config.train.batch_size // mini)

    def learn(
        self,
        groups: list[Group],
        scores: Scores,
        timer: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> tuple[StepBatch, StepStats]:
        """Update the policy on the groups of a step; on every rank, with the groups of all of them."""
        config, algorithm = self.config, self.config.algorithm
        batch = StepBatch(groups, self.scorer.normalize(scores), np.zeros(scores.total.shape))
        with timer("old_log_p"):
            if algorithm.kl_in_reward or self.policy.needs_old_logprobs(algorithm, len(groups)):
                batch.old_logprobs = self.policy.logprobs(groups)
        with timer("reference_model"):
            if self.ref is not None:
                batch.ref_logprobs = self.ref.logprobs(groups)
        with timer("adv"):
            batch.advantages = advantages_of(
                batch,
                algorithm,
                parts=scores.parts,
                weights=scores.weights,
                kl_coef=self.policy.current_kl_coef(algorithm),
                max_response_length=config.rollout.max_response_length,
            )
        with timer("update"):
            stats = self.policy.update(
                batch,
                algorithm,
                optimizer=self.optimizer,
                lr=lambda i: learning_rate(i, config.train, self.total_optimizer_steps),
                max_response_length=config.rollout.max_response_length,
            )
        return batch, stats
