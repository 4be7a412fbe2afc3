"""Steered coefficients: what a step uses, what the next one does, and what a checkpoint keeps."""

from __future__ import annotations

import json

import pytest

from covey.config.algorithm import AlgorithmConfig
from covey.config.scoring_models import DistillationConfig
from covey.steering import Steering

KL = AlgorithmConfig(kl_coef=0.1, kl_target=0.1, kl_horizon=100)
ENTROPY = AlgorithmConfig(entropy_coef=0.01, entropy_target=2.0, entropy_coef_delta=0.005)


def test_without_targets_the_coefficients_are_the_configured_ones() -> None:
    fixed = AlgorithmConfig(kl_coef=0.1, entropy_coef=0.02)
    steering = Steering()
    used = steering.after_step(fixed, {"actor/kl_loss": 5.0, "actor/entropy": 5.0}, num_responses=10)
    assert used == {"actor/kl_coef": 0.1}
    assert (steering.kl_coef(fixed), steering.entropy_coef(fixed)) == (0.1, 0.02)


def test_a_step_reports_what_it_used_and_the_next_one_uses_what_it_measured() -> None:
    """KL twice its target: + 20 % of 50 / 100. The worked example of KlController."""
    steering = Steering()
    assert steering.after_step(KL, {"actor/kl_loss": 0.2}, num_responses=50) == {"actor/kl_coef": 0.1}
    assert steering.kl_coef(KL) == pytest.approx(0.11)
    assert steering.objective(KL, None).kl_coef == pytest.approx(0.11)


def test_the_entropy_bonus_follows_its_target() -> None:
    steering = Steering()
    assert steering.objective(ENTROPY, None).entropy_coef == 0.0
    steering.after_step(ENTROPY, {"actor/entropy": 1.5}, num_responses=1)
    assert steering.objective(ENTROPY, None).entropy_coef == pytest.approx(0.015)
    used = steering.after_step(ENTROPY, {"actor/entropy": 2.5}, num_responses=1)
    assert used == {"actor/entropy_coef": pytest.approx(0.015)}
    assert steering.objective(ENTROPY, None).entropy_coef == 0.0


def test_a_checkpoint_goes_on_where_it_stood() -> None:
    both = AlgorithmConfig(**(KL.model_dump() | ENTROPY.model_dump(include={"entropy_coef", "entropy_target"})))
    steering, again = Steering(), Steering()
    measured = {"actor/kl_loss": 0.3, "actor/entropy": 1.0}
    steering.after_step(both, measured, num_responses=20)
    again.load_state_dict(json.loads(json.dumps(steering.state_dict())), both)
    for one in (steering, again):
        one.after_step(both, measured, num_responses=20)
    assert again.objective(both, None) == steering.objective(both, None)
    assert again.state_dict() == steering.state_dict()


def test_a_coefficient_that_is_no_longer_steered_is_the_configured_one() -> None:
    steering = Steering()
    steering.after_step(KL, {"actor/kl_loss": 0.3}, num_responses=20)
    again, fixed = Steering(), AlgorithmConfig(kl_coef=0.7)
    again.load_state_dict(steering.state_dict(), fixed)
    assert again.kl_coef(fixed) == 0.7


def test_the_objective_has_the_teachers_weight() -> None:
    objective = Steering().objective(AlgorithmConfig(), DistillationConfig(teacher="t", coef=0.3, discount=0.5))
    assert (objective.distill_coef, objective.distill_discount) == (0.3, 0.5)
