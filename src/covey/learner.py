"""The second half of a training step: from a scored rollout to the update. `covey replay` runs it from records.

scores -> one scale over tasks -> old, reference and teacher log-probabilities -> advantages -> epochs x mini-batches
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey.config.schema import Config
from covey.credit import advantages_of
from covey.optim import Optimizer, learning_rate
from covey.policy import Policy
from covey.reference import Follower, ScoresGroups, ScoringModel, load_reference, load_teacher
from covey.rewards.runner import Scorer
from covey.rewards.scores import Scores
from covey.setup import Parts, make_optimizer
from covey.types import Group, StepBatch, StepStats


def make_learner(config: Config, parts: Parts, scorer: Scorer) -> Learner:
    """The learner of a run, with the models that it compares the policy with."""
    policy, optimizer = parts.policy, make_optimizer(parts, config.train)
    ref = load_reference(config, parts) if config.algorithm.kl_coef else None
    follower = None
    if isinstance(ref, ScoringModel):
        settings = config.reference
        follower = Follower(ref, policy, optimizer, sync_every=settings.sync_every, decay=settings.decay)
    teacher = None if config.distillation is None else load_teacher(config, parts)
    return Learner(config, policy, ref, scorer, optimizer, teacher=teacher, follower=follower)


@dataclass
class Learner:
    """The parts of a run that an update needs. It has no state of its own: what changes is in the parts."""

    config: Config
    policy: Policy
    ref: ScoresGroups | None  # the reference; None without a KL term
    scorer: Scorer  # for the scale of its rewards
    optimizer: Optimizer
    teacher: ScoresGroups | None = None  # None without distillation
    follower: Follower | None = None  # moves the reference; None without one of its own

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
        with timer("teacher_model"):
            if self.teacher is not None:
                batch.teacher_logprobs = self.teacher.logprobs(groups)
        with timer("adv"):
            batch.advantages = advantages_of(
                batch,
                algorithm,
                parts=scores.parts,
                weights=scores.weights,
                kl_coef=self.policy.steering.kl_coef(algorithm),
                max_response_length=config.rollout.max_response_length,
            )
        with timer("update"):
            stats = self.policy.update(
                batch,
                algorithm,
                optimizer=self.optimizer,
                lr=lambda i: learning_rate(i, config.train, self.total_optimizer_steps),
                max_response_length=config.rollout.max_response_length,
                distillation=config.distillation,
            )
        with timer("reference_model"):
            if self.follower is not None:
                self.follower.after_step()
        return batch, stats

    def checkpoint_parts(self, *, saving: bool) -> dict[str, Any]:
        """The weights and moments of a checkpoint: arguments of Checkpoints.save and load.

        A reference that never moved is not written, and one that is not in a checkpoint is not read.
        """
        follower = self.follower
        with_reference = follower is not None and follower.possible and (follower.moved or not saving)
        return {
            "model": self.policy.model,
            "optimizer": self.optimizer,
            "cuts": self.policy.parallel.cuts,
            "others": {"reference": follower.pieces()} if follower is not None and with_reference else {},
        }

    def state_dict(self) -> dict[str, Any]:
        """What of the parts changes besides weights and moments, as JSON."""
        return {
            "optimizer_steps": self.policy.optimizer_steps,
            "steering": self.policy.steering.state_dict(),
            "scorer": self.scorer.state_dict(),
            "reference": None if self.follower is None else self.follower.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state, after its weights were read into `checkpoint_parts`."""
        self.policy.optimizer_steps = state["optimizer_steps"]
        self.policy.steering.load_state_dict(state["steering"], self.config.algorithm)
        self.scorer.load_state_dict(state["scorer"])
        if self.follower is not None and state["reference"] is not None:
            self.follower.load_state_dict(state["reference"])
