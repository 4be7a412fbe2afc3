"""Which rank of a rollout was the slowest."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest

from covey.distributed.mesh import Mesh
from covey.rollout.engine import Sampling
from covey.rollout.shared import SharedEngine
from covey.types import Group, Prompt, Response


class SleepingEngine:
    """Takes a tenth of a second for any prompts."""

    def generate(self, prompts, sampling, *, on_group=None):
        time.sleep(0.1)
        return [Group(prompt, [Response([1], [0.0])]) for prompt in prompts]

    def load_weights(self, weights, *, version):
        raise AssertionError("not called")


def test_one_rank_is_in_balance_with_itself():
    engine = SharedEngine(SleepingEngine(), Mesh(1, 1, 1, 1, 1), nullcontext)
    engine.generate([Prompt(0, [1], "a")], Sampling(num_samples=1, max_response_length=1))
    assert engine.balance() == {"rollout_imbalance": 0.0, "rollout_slowest_rank": 0.0}


def test_imbalance_is_the_slowest_over_the_mean():
    engine = SharedEngine(SleepingEngine(), Mesh(1, 1, 1, 1, 1), nullcontext)
    engine._seconds = [1.0, 1.0, 3.0, 1.0]  # mean 1.5
    assert engine.balance() == {"rollout_imbalance": pytest.approx(1.0), "rollout_slowest_rank": 2.0}
