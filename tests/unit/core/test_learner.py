"""The half of a step after the rollout, on a tiny model, against its parts called one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed import cases

from covey.config.schema import Config
from covey.distributed.mesh import Mesh
from covey.learner import Learner
from covey.optim import Optimizer
from covey.rewards.runner import Scorer
from covey.rewards.scores import Scores


def _learner(**algorithm: Any) -> Learner:
    config = Config.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "rollout": {"num_samples": 4},
            "reward": {"functions": ["math"], "num_workers": 0},
            "algorithm": algorithm,
            "train": {"steps": 10, "batch_size": 4, "lr": 1e-2, "schedule": "linear"},
            "output_dir": "unused",
        }
    )
    policy = cases.policy_of(cases.model("qwen2"), Mesh())
    optimizer = Optimizer(policy.model.parameters(), config.train)
    return Learner(config, policy, None, Scorer(config.reward), optimizer)


def _scores(rewards: np.ndarray) -> Scores:
    return Scores(rewards, parts={"math": rewards}, weights={"math": np.ones(len(rewards))}, tasks=[""] * len(rewards))


def test_optimizer_steps_are_counted_over_epochs_and_mini_batches() -> None:
    assert _learner(epochs=3, mini_batch_size=2).total_optimizer_steps == 10 * 3 * 2
    assert _learner().total_optimizer_steps == 10


def test_one_update_needs_no_old_logprobs_and_moves_the_weights_once() -> None:
    learner, groups, rewards = _learner(), cases.batch().groups, cases.batch().rewards
    before = learner.optimizer.checksum()
    batch, stats = learner.learn(groups, _scores(rewards))
    assert batch.old_logprobs is None and batch.ref_logprobs is None
    wanted = [(row - row.mean()) / (row.std(ddof=1) + 1e-6) for row in rewards]
    np.testing.assert_allclose(batch.advantages, wanted, atol=1e-12)
    assert learner.policy.optimizer_steps == 1 and learner.optimizer.checksum() != before
    assert stats.values["actor/lr"] == 1e-2  # the first of ten steps down to 0


def test_several_updates_compare_with_the_policy_that_started_them() -> None:
    learner, groups = _learner(epochs=2), cases.batch().groups
    before = learner.policy.logprobs(groups).clone()
    batch, stats = learner.learn(groups, _scores(cases.batch().rewards))
    assert batch.old_logprobs is not None and torch.equal(batch.old_logprobs, before)
    assert learner.policy.optimizer_steps == 2
    assert stats.values["actor/lr"] == pytest.approx(1e-2 * (1 - 1 / 20))
    assert stats.values["actor/ppo_kl"] != 0.0  # the second pass is not on-policy any more


def test_going_on_from_a_state_gives_the_bits_of_not_stopping() -> None:
    rewards, groups = cases.batch().rewards, cases.batch().groups
    whole, first = _learner(epochs=2), _learner(epochs=2)
    for _ in range(2):
        whole.learn(groups, _scores(rewards))
    first.learn(groups, _scores(rewards))
    second = _learner(epochs=2)
    second.policy.model.load_state_dict(first.policy.model.state_dict())
    for mine, theirs in zip(second.optimizer.moments(), first.optimizer.moments(), strict=True):
        for name, moment in mine.items():
            moment.copy_(theirs[name])
    second.optimizer.steps = first.optimizer.steps
    second.load_state_dict(first.state_dict())
    second.learn(groups, _scores(rewards))
    assert second.optimizer.checksum() == whole.optimizer.checksum()
