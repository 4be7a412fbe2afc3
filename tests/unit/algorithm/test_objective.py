"""The assembled objective: what each term acts on, and that cutting a step differently changes nothing."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.algorithm.aggregation import AGGREGATIONS, token_weights
from covey.algorithm.correction import CORRECTIONS
from covey.algorithm.losses import LOSSES, LossOptions
from covey.algorithm.objective import Objective, Tokens, token_objective

LENGTHS = [5, 1, 3, 4, 2, 6]
INDEX = torch.repeat_interleave(torch.arange(6), torch.tensor(LENGTHS))
ALL_TERMS = Objective(
    loss=LOSSES["grpo"],
    options=LossOptions(clip_low=0.1, clip_high=0.2),
    kl_coef=0.05,
    kl_importance_weighted=True,
    entropy_coef=0.01,
    rollout_correction="sequence_truncate",
    rollout_ratio_high=1.1,
    off_policy_max_kl=0.01,
)


def step_tokens() -> Tokens:
    """A step of six responses with everything different from everything."""
    generator = torch.Generator().manual_seed(11)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(len(INDEX), generator=generator, dtype=torch.float64)

    old = -noise(1.0).abs() - 0.2
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    return Tokens(
        logprobs=(old + noise(0.15)).requires_grad_(),
        entropy=noise(1.0).abs(),
        old_logprobs=old,
        rollout_logprobs=old + noise(0.05),
        ref_logprobs=old + noise(0.1),
        advantages=advantages[INDEX],
        response_index=INDEX,
        num_responses=6,
        keep=noise(1.0) > -0.5,
    )


def micro_batch(tokens: Tokens, responses: list[int]) -> Tokens:
    """The tokens of these responses, renumbered from 0 in the given order."""
    rows = torch.cat([torch.nonzero(INDEX.eq(r)).ravel() for r in responses])
    renumber = {r: i for i, r in enumerate(responses)}
    cut = {f.name: value[rows] for f in fields(tokens) if isinstance(value := getattr(tokens, f.name), Tensor)}
    cut["response_index"] = torch.tensor([renumber[r] for r in INDEX[rows].tolist()])
    return replace(tokens, num_responses=len(responses), **cut)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("cut", [[[5, 2, 0, 4, 1, 3]], [[3], [0, 5], [1, 4, 2]], [[r] for r in range(6)]])
def test_gradient_does_not_depend_on_the_cut_into_micro_batches(
    loss: str, aggregation: str, cut: list[list[int]]
) -> None:
    included = np.array([True, True, False, True, True, True])
    weights = torch.tensor(
        token_weights(np.array(LENGTHS), included, aggregation, num_responses=6, max_response_length=8)
    )
    gradients = []
    for batches in ([list(range(6))], cut):
        tokens = step_tokens()
        for responses in batches:
            part = micro_batch(tokens, responses)
            total = token_objective(part, replace(ALL_TERMS, loss=LOSSES[loss])).total
            (total * weights[torch.tensor(responses)][part.response_index]).sum().backward()
        gradients.append(tokens.logprobs.grad)
    assert gradients[0].abs().sum() > 0
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-12, atol=1e-15)


def test_masks_and_rollout_weights_do_not_act_on_the_kl() -> None:
    tokens = replace(step_tokens(), keep=torch.zeros(len(INDEX), dtype=torch.bool))
    objective = replace(ALL_TERMS, entropy_coef=0.0, kl_importance_weighted=False)
    out = token_objective(tokens, objective)
    assert out.kl is not None and tokens.ref_logprobs is not None
    gap = tokens.ref_logprobs - tokens.logprobs
    assert torch.allclose(out.total, 0.05 * (gap.exp() - gap - 1))
    assert not out.policy.loss.any()


def test_switched_off_terms_leave_the_bare_loss() -> None:
    tokens = replace(step_tokens(), keep=None, ref_logprobs=None)
    bare = Objective(loss=LOSSES["grpo"], options=ALL_TERMS.options)
    out = token_objective(tokens, bare)
    ratio = (tokens.logprobs - tokens.old_logprobs).exp()
    a = tokens.advantages
    assert torch.allclose(out.total, -torch.minimum(ratio * a, ratio.clamp(0.9, 1.2) * a))
    assert out.kl is None and out.rollout_weight is None


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correction", [None, *CORRECTIONS])
def test_one_bad_token_leaves_loss_and_gradient_finite(loss: str, correction: str | None) -> None:
    for name in ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "entropy"):
        for bad in (float("nan"), float("-inf")):
            tokens = step_tokens()
            if name == "entropy":  # both come from the same logits
                tokens.logprobs.data[2] = bad
            getattr(tokens, name).data[2] = bad
            total = token_objective(tokens, replace(ALL_TERMS, loss=LOSSES[loss], rollout_correction=correction)).total
            total.sum().backward()
            assert tokens.logprobs.grad is not None
            assert torch.isfinite(total).all() and torch.isfinite(tokens.logprobs.grad).all()
