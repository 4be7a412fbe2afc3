"""Rollout weights and masks against loops over responses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.algorithm.correction import CORRECTIONS, high_entropy_tokens, on_policy_enough, rollout_weights

OLD = torch.tensor([-1.0, -0.5, -2.0, -0.3, -0.9])
ROLLOUT = torch.tensor([-1.3, -0.4, -1.5, -0.9, -0.8])
INDEX = torch.tensor([0, 0, 1, 1, 1])
LOW, HIGH = 0.8, 1.15


def weights(kind: str, old: Tensor = OLD, *, low: float | None = LOW, high: float = HIGH) -> list[float]:
    return rollout_weights(old, ROLLOUT, INDEX, 2, kind=kind, low=low, high=high).tolist()


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize(("low", "high"), [(LOW, HIGH), (None, 1.02), (0.6, 1.3), (None, 100.0)])
def test_each_kind_by_a_loop(kind: str, low: float | None, high: float) -> None:
    level, action = kind.split("_")
    expected = []
    for i, response in enumerate(INDEX.tolist()):
        own = math.exp((OLD - ROLLOUT)[i])
        all_of_it = [
            math.exp(d) for d, r in zip((OLD - ROLLOUT).tolist(), INDEX.tolist(), strict=True) if r == response
        ]
        product = math.prod(all_of_it)
        tested = {"token": own, "sequence": product, "geometric": product ** (1 / len(all_of_it))}[level]
        ratio = own if level == "geometric" else tested
        if action == "truncate":
            expected.append(min(max(tested, low or 0.0), high))
        else:
            expected.append(ratio if (low or 0.0) <= tested <= high else 0.0)
    assert weights(kind, low=low, high=high) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_equal_logprobs_give_weight_one(kind: str) -> None:
    assert rollout_weights(OLD, OLD, INDEX, 2, kind=kind, low=LOW, high=HIGH).tolist() == [1.0] * 5


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_token_without_a_logprob_is_not_corrected(kind: str, bad: float) -> None:
    old, same = OLD.clone(), OLD.clone()
    old[1] = bad
    same[1] = ROLLOUT[1]
    assert weights(kind, old, low=None, high=9.0) == weights(kind, same, low=None, high=9.0)


def test_weights_carry_no_gradient() -> None:
    old = OLD.clone().requires_grad_()
    assert not rollout_weights(old, ROLLOUT, INDEX, 2, kind="token_truncate", low=None, high=2.0).requires_grad


def test_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"token_clip.*token_truncate, token_mask"):
        weights("token_clip")


def test_only_bad_responses_far_away_are_dropped() -> None:
    """Mean of sampled - current: response 0 is at 0.3, response 1 at -0.2."""
    sampled, current = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.1, -1.5, -0.8])
    index = torch.tensor([0, 0, 1])
    for advantage, limit, expected in (
        (-1.0, 0.2, [False, False, True]),
        (-1.0, 0.4, [True, True, True]),
        (1.0, 0.2, [True, True, True]),
        (0.0, 0.2, [True, True, True]),
    ):
        got = on_policy_enough(current, sampled, torch.full((3,), advantage), index, 2, max_kl=limit)
        assert got.tolist() == expected


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.999])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_high_entropy_tokens_are_those_at_or_over_numpys_quantile(share: float, count: int) -> None:
    entropy = torch.rand(count, generator=torch.Generator().manual_seed(count))
    expected = entropy.numpy() >= np.quantile(entropy.numpy(), 1 - share) - 1e-7
    assert high_entropy_tokens(entropy, share=share).tolist() == expected.tolist()


def test_high_entropy_tokens_keeps_all_for_share_one_and_nothing_of_nothing() -> None:
    assert high_entropy_tokens(torch.tensor([0.0, 1.0]), share=1.0).tolist() == [True, True]
    assert high_entropy_tokens(torch.zeros(0), share=0.2).tolist() == []
