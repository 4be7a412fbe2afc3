"""Advantages from a teacher: a worked example, a loop, bad numbers, and the gradient that they lead to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from covey.algorithm.distillation import discounted_sum, distillation_advantages
from covey.algorithm.losses import LossOptions, find_loss
from covey.algorithm.objective import Objective, Tokens, token_objective

OLD = torch.tensor([-1.0, -2.0, -1.0, -0.5])
TEACHER = torch.tensor([-2.0, -1.0, -1.5, -0.25])
RESPONSE = torch.tensor([0, 0, 0, 1])


def test_the_worked_example() -> None:
    """The gaps are [-1, 1, -0.5] and [0.25]; half of what follows is added, within the response."""
    found = distillation_advantages(OLD, TEACHER, RESPONSE, coef=1.0, discount=0.5)
    torch.testing.assert_close(found, torch.tensor([-0.625, 0.75, -0.5, 0.25]), rtol=0, atol=0)
    found = distillation_advantages(OLD, TEACHER, RESPONSE, coef=2.0, discount=0.0)
    torch.testing.assert_close(found, torch.tensor([-2.0, 2.0, -1.0, 0.5]), rtol=0, atol=0)


@pytest.mark.parametrize("discount", [0.0, 0.3, 0.99, 1.0])
def test_the_discounted_sum_equals_a_loop(discount: float) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 17, 2, 64, 5, 1]
    values = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    expected, later = values.clone(), 0.0
    for t in reversed(range(len(values))):
        ends = t + 1 == len(values) or index[t + 1] != index[t]
        later = values[t] + (0.0 if ends else discount * later)
        expected[t] = later
    torch.testing.assert_close(discounted_sum(values, index, discount=discount), expected)


def test_bad_numbers_are_left_out_and_large_ones_held() -> None:
    old = torch.tensor([-1.0, -math.inf, -1.0, -1.0])
    teacher = torch.tensor([-math.inf, -1.0, math.nan, -500.0])
    found = distillation_advantages(old, teacher, torch.zeros(4, dtype=torch.int64), coef=1.0, discount=0.0)
    assert found.tolist() == [0.0, 0.0, 0.0, -20.0]


def test_no_tokens_give_no_advantages() -> None:
    none = torch.zeros(0)
    assert distillation_advantages(none, none, none.long(), coef=1.0, discount=0.5).shape == (0,)


def _loss(logits: Tensor, teacher: Tensor, tokens: Tensor, *, discount: float) -> Tensor:
    """The mean objective of one response per sampled pair of tokens, on policy, teacher alone."""
    logp = logits.log_softmax(-1)
    chosen = logp.gather(1, tokens.T).T.reshape(-1)  # tokens (n, 2): position 0 and 1 of every response
    zeros = torch.zeros_like(chosen)
    index = torch.arange(len(tokens)).repeat_interleave(2)
    out = token_objective(
        Tokens(
            logprobs=chosen,
            entropy=zeros,
            old_logprobs=chosen.detach(),
            rollout_logprobs=chosen.detach(),
            ref_logprobs=None,
            advantages=zeros,
            response_index=index,
            num_responses=len(tokens),
            teacher_logprobs=teacher.log_softmax(-1).gather(1, tokens.T).T.reshape(-1),
        ),
        Objective(
            find_loss("grpo"),
            LossOptions(clip_low=0.2, clip_high=0.2),
            distill_coef=1.0,
            distill_discount=discount,
        ),
    )
    weights = logp.detach().exp()
    chance = (weights[0][tokens[:, 0]] * weights[1][tokens[:, 1]]).repeat_interleave(2)
    return (out.total * chance).sum()


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_the_expected_gradient_is_that_of_the_reverse_kl(discount: float) -> None:
    """Over all responses of two tokens, each with its probability. The positions are independent here, so that what
    follows a token has no part in the KL's gradient, and both discounts must give the same expectation."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    every = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    (found,) = torch.autograd.grad(_loss(logits, teacher, every, discount=discount), logits)
    logp = logits.log_softmax(-1)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - teacher.log_softmax(-1))).sum(), logits)
    torch.testing.assert_close(found, expected)
