"""Losses against TRL's numbers, hand-worked values, and finite differences of a loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from covey.algorithm.losses import LOSSES, LossOptions, TokenLoss, find_loss

OPTIONS = LossOptions(clip_low=0.2, clip_high=0.28)


def random_responses() -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs (a leaf), old logprobs and response_index of three responses of 4, 3 and 2 tokens."""
    generator = torch.Generator().manual_seed(5)
    old = -2 * torch.rand(9, generator=generator)
    logprobs = (old + 0.1 * torch.randn(9, generator=generator)).requires_grad_()
    return logprobs, old, torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])


def call(loss: str, logprobs: Tensor, old: Tensor, advantages: Tensor, options: LossOptions = OPTIONS) -> TokenLoss:
    index = torch.zeros(len(logprobs), dtype=torch.int64)
    return LOSSES[loss](logprobs, old, advantages, index, 1, options)


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_gradient_is_the_policy_gradient(loss: str) -> None:
    """At ratio 1 the gradient of every loss is -A, except that a response's ratio spreads it over its tokens."""
    logprobs = torch.tensor([-0.5, -1.5, -0.1], requires_grad=True)
    advantages = torch.full((3,), -2.0)
    call(loss, logprobs, logprobs.detach(), advantages).loss.mean().backward()
    assert logprobs.grad is not None
    # rloo: every token holds the response's loss, so the mean of the three has the gradient of one.
    expected = 2.0 if loss == "rloo" else 2.0 / 3
    assert logprobs.grad.tolist() == pytest.approx([expected] * 3, abs=1e-6)


def test_gspo_ratio_is_a_mean_within_each_response_only() -> None:
    logprobs, old = torch.tensor([0.0, 0.3, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.0, 0.2])
    index = torch.tensor([1, 1, 0, 0])  # any order of responses
    ratio = LOSSES["gspo"](logprobs, old, torch.ones(4), index, 2, OPTIONS).ratio
    assert ratio.tolist() == pytest.approx([math.exp(0.15)] * 2 + [math.exp(-0.1)] * 2)


def test_gspo_token_has_gspo_values_and_each_token_its_own_advantage() -> None:
    old = torch.tensor([-1.0, -2.0])
    advantages = torch.tensor([1.0, 3.0])
    logprobs = torch.tensor([-0.9, -2.02], requires_grad=True)
    token = call("gspo_token", logprobs, old, advantages)
    ratio = math.exp((0.1 - 0.02) / 2)
    assert token.loss.tolist() == pytest.approx([-ratio, -3 * ratio], abs=1e-6)
    token.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-ratio, -3 * ratio], abs=1e-6)


def test_gspo_token_with_one_advantage_has_the_gradient_of_gspo() -> None:
    gradients = []
    for loss in ("gspo", "gspo_token"):
        logprobs, old, index = random_responses()
        advantages = torch.tensor([1.0, -0.5, -1.5])[index]
        token = LOSSES[loss](logprobs, old, advantages, index, 3, OPTIONS)
        (token.loss / torch.bincount(index)[index]).sum().backward()
        gradients.append(logprobs.grad)
    assert torch.allclose(gradients[0], gradients[1], atol=1e-7)


def test_rloo_is_a_clipped_ratio_of_whole_responses() -> None:
    logprobs, old, index = random_responses()
    advantages = torch.tensor([1.0, -0.5, -1.5])
    token = LOSSES["rloo"](logprobs, old, advantages[index], index, 3, OPTIONS)
    for response in range(3):
        ratio = math.prod(math.exp(d) for d in (logprobs - old)[index == response].tolist())
        advantage = advantages[response].item()
        expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
        assert token.loss[index == response].tolist() == pytest.approx([expected] * (index == response).sum(), abs=1e-6)


def test_dual_clip_bounds_the_loss_of_a_bad_response() -> None:
    old, logprobs = torch.tensor([-5.0]), torch.tensor([-1.0], requires_grad=True)
    token = call("grpo", logprobs, old, torch.tensor([-1.0]), LossOptions(clip_low=0.2, clip_high=0.2, dual_clip=3.0))
    token.loss.sum().backward()
    assert token.loss.item() == 3.0
    assert token.clipped.item()
    assert logprobs.grad is not None and logprobs.grad.item() == 0.0


@pytest.mark.parametrize("loss", ["grpo", "gspo", "gspo_token", "rloo"])
def test_clipped_marks_exactly_the_tokens_without_gradient(loss: str) -> None:
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(64, generator=generator)
    logprobs = (old + 0.6 * torch.randn(64, generator=generator)).requires_grad_()
    advantages = torch.randn(64, generator=generator)
    options = LossOptions(clip_low=0.2, clip_high=0.28, dual_clip=1.5)
    # A response per token, so that a response's ratio is its token's.
    token = LOSSES[loss](logprobs, old, advantages, torch.arange(64), 64, options)
    token.loss.sum().backward()
    assert logprobs.grad is not None
    assert 5 < token.clipped.sum() < 60
    assert torch.equal(token.clipped, logprobs.grad == 0.0)


def test_cispo_keeps_the_gradient_of_tokens_over_the_limit() -> None:
    logprobs = torch.tensor([0.0, -3.0], requires_grad=True)
    token = call("cispo", logprobs, torch.tensor([-1.0, -1.0]), torch.ones(2), LossOptions(clip_low=1.0, clip_high=0.5))
    token.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-1.5, -math.exp(-2)], abs=1e-6)
    assert token.clipped.tolist() == [True, False]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("where", ["logprobs", "old"])
def test_token_that_is_not_finite_is_left_out_and_counted(loss: str, bad: float, where: str) -> None:
    """The other token of the response gets the loss and gradient it has alone."""
    values = {"logprobs": torch.tensor([-0.7, -1.0]), "old": torch.tensor([-0.8, -1.0])}
    values[where][1] = bad
    logprobs = values["logprobs"].requires_grad_()
    token = call(loss, logprobs, values["old"], torch.tensor([1.0, 1.0]))
    alone = torch.tensor([-0.7], requires_grad=True)
    expected = call(loss, alone, torch.tensor([-0.8]), torch.tensor([1.0])).loss
    token.loss.sum().backward()
    expected.sum().backward()
    assert logprobs.grad is not None and alone.grad is not None
    assert token.finite.tolist() == [True, False]
    assert token.loss.tolist() == pytest.approx([expected.item(), 0.0], abs=1e-6)
    assert logprobs.grad.tolist() == pytest.approx([alone.grad.item(), 0.0], abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_huge_log_ratio_gives_a_finite_loss_and_gradient(loss: str, advantage: float, gap: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    token = call(loss, logprobs, torch.tensor([-1.0 - gap]), torch.tensor([advantage]))
    token.loss.sum().backward()
    assert logprobs.grad is not None
    assert math.isfinite(token.loss.item())
    assert math.isfinite(logprobs.grad.item())


@pytest.mark.parametrize("loss", LOSSES)
def test_no_tokens_give_an_empty_loss(loss: str) -> None:
    empty = torch.zeros(0, requires_grad=True)
    total = LOSSES[loss](
        empty, empty.detach(), empty.detach(), torch.zeros(0, dtype=torch.int64), 2, OPTIONS
    ).loss.sum()
    total.backward()
    assert total.item() == 0.0


def test_a_loss_is_found_by_name_or_as_module_and_function() -> None:
    assert find_loss("gspo") is LOSSES["gspo"]
    assert find_loss("covey.algorithm.losses:sapo") is LOSSES["sapo"]


@pytest.mark.parametrize("name", ["gpro", "no.such.module:loss", "covey.algorithm.losses:gpro"])
def test_an_unknown_loss_names_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*known: grpo, gspo"):
        find_loss(name)
