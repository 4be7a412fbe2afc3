"""Advantages as the configuration says, against the formulas written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from covey.algorithm.advantages import ADVANTAGES, gdpo, pass_at_k
from covey.config.schema import AlgorithmConfig
from covey.credit import ADVANTAGE_NAMES, advantages_of, check_advantage
from covey.types import Group, Prompt, Response, StepBatch

LENGTHS = [[2, 4, 3], [1, 1, 4]]
REWARDS = np.array([[1.0, 0.0, 0.5], [0.2, 0.4, np.nan]])
PARTS = {"right": np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]), "form": np.array([[0.0, 0.0, 1.0], [0.4, 0.8, 1.0]])}
WEIGHTS = {"right": np.array([1.0, 1.0]), "form": np.array([0.5, 0.5])}


def compute(*, kl_coef: float = 0.0, **settings: Any) -> np.ndarray:
    groups = [
        Group(Prompt(uid, [1], ""), [Response([1] * n, [0.0] * n) for n in lengths])
        for uid, lengths in enumerate(LENGTHS)
    ]
    batch = StepBatch(groups, REWARDS, np.zeros_like(REWARDS))
    batch.old_logprobs = torch.full((15,), -1.0)
    batch.ref_logprobs = -1.0 - torch.arange(15) / 10
    algorithm = AlgorithmConfig.model_validate({"kl_coef": kl_coef, **settings})
    return advantages_of(batch, algorithm, parts=PARTS, weights=WEIGHTS, kl_coef=2 * kl_coef, max_response_length=4)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_without_shaping_it_is_the_named_advantage_of_the_rewards(name: str) -> None:
    assert np.array_equal(compute(advantage=name), ADVANTAGES[name](REWARDS, eps=1e-6))


def test_overlong_responses_lose_reward() -> None:
    penalty = np.array([[0.0, 0.3, 0.15], [0.0, 0.0, 0.3]])  # buffer 2 of 4: lengths 3 and 4 are half and full
    got = compute(advantage="group_center", overlong_buffer=2, overlong_penalty=0.3)
    assert got == pytest.approx(ADVANTAGES["group_center"](REWARDS - penalty, eps=0.0))


def test_kl_of_a_response_is_subtracted_with_the_current_coefficient() -> None:
    """k1 = old - ref = token number / 10, summed over each response's tokens; the controller has doubled kl_coef."""
    sums = np.array([[0.1, 1.4, 2.1], [0.9, 1.0, 5.0]])
    got = compute(advantage="group_center", kl_in_reward=True, kl_estimator="k1", kl_coef=0.05)
    assert got == pytest.approx(ADVANTAGES["group_center"](REWARDS - 0.1 * sums, eps=0.0), abs=1e-6)


def test_pass_at_k_uses_the_configured_k() -> None:
    assert np.array_equal(compute(advantage="pass_at_k", pass_k=1), pass_at_k(REWARDS, k=1, eps=1e-6))


def test_gdpo_compares_each_function_and_leaves_out_what_has_no_total() -> None:
    scored = np.stack([np.where(np.isnan(REWARDS), np.nan, cells) for cells in PARTS.values()], axis=2)
    expected = gdpo(scored, weights=np.array([1.0, 0.5]), eps=1e-6)
    assert compute(advantage="gdpo") == pytest.approx(expected)
    assert expected[1, 2] == 0.0


def test_gdpo_takes_the_overlong_penalty_as_one_more_function() -> None:
    penalty = np.array([[0.0, -0.3, -0.15], [0.0, 0.0, -0.3]])
    stacked = [np.where(np.isnan(REWARDS), np.nan, cells) for cells in (*PARTS.values(), penalty)]
    expected = gdpo(np.stack(stacked, axis=2), weights=np.array([1.0, 0.5, 1.0]), eps=1e-6)
    assert compute(advantage="gdpo", overlong_buffer=2, overlong_penalty=0.3) == pytest.approx(expected)


@pytest.mark.parametrize("name", ADVANTAGE_NAMES)
def test_every_name_gives_zero_where_nothing_was_scored(name: str) -> None:
    assert compute(advantage=name)[1, 2] == 0.0


def test_a_users_advantage_gets_the_shaped_rewards() -> None:
    got = compute(advantage="covey.algorithm.advantages:group_center", overlong_buffer=2, overlong_penalty=0.3)
    assert np.array_equal(got, compute(advantage="group_center", overlong_buffer=2, overlong_penalty=0.3))


@pytest.mark.parametrize("name", ADVANTAGE_NAMES)
def test_every_name_passes_the_check_at_start(name: str) -> None:
    check_advantage(name)


def test_an_unknown_advantage_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="algorithm.advantage: 'gpdo' is unknown, did you mean 'gdpo'"):
        check_advantage("gpdo")
