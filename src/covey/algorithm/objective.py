"""The objective of a micro-batch, token by token: policy loss, masks and weights on it, KL term, entropy bonus.

    objective_t = keep_t weight_t policy_loss_t + kl_coef KL_t - entropy_coef H_t

in TRL's order: masks and rollout weights act on the policy loss and not on the KL. Multiply by the token weights of
aggregation.py and sum. So KL and entropy share the denominator of the policy loss (TRL and MindSpeed-RL average the
entropy over tokens whatever the aggregation; with `token_mean` that is the same). The advantage in the policy loss is
the response's, plus with a teacher the token's own (distillation.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from covey.algorithm.correction import finite_difference, on_policy_enough, rollout_weights
from covey.algorithm.distillation import distillation_advantages
from covey.algorithm.kl import KL_ESTIMATORS
from covey.algorithm.losses import LossFn, LossOptions, TokenLoss


@dataclass(frozen=True)
class Objective:
    """What is minimised. None and 0 switch a term off."""

    loss: LossFn
    options: LossOptions
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_importance_weighted: bool = False  # multiply the KL by the importance ratio: unbiased gradient for k3
    entropy_coef: float = 0.0
    rollout_correction: str | None = None  # a kind of correction.py
    rollout_ratio_low: float | None = None
    rollout_ratio_high: float = 2.0
    distill_coef: float = 0.0  # weight of the teacher's advantages; read with Tokens.teacher_logprobs
    distill_discount: float = 0.0
    off_policy_max_kl: float | None = None  # responses with a negative advantage further away are left out


@dataclass(frozen=True)
class Tokens:
    """The response tokens of a micro-batch, (n,) each, whole responses."""

    logprobs: Tensor  # under the policy being trained; carries the gradient
    entropy: Tensor  # of the policy; carries the gradient
    old_logprobs: Tensor  # under the policy that started the update
    rollout_logprobs: Tensor  # as the engine reported them
    ref_logprobs: Tensor | None  # under the reference; None: no KL term
    advantages: Tensor  # the response's, repeated
    response_index: Tensor  # int64, 0..num_responses-1
    num_responses: int
    teacher_logprobs: Tensor | None = None  # under the teacher; None: no distillation
    keep: Tensor | None = None  # bool: tokens whose policy loss counts (high_entropy_tokens); None: all


@dataclass(frozen=True)
class TokenObjective:
    """The objective and its parts, (n,) each."""

    total: Tensor  # multiply by the token weights and sum
    policy: TokenLoss  # its loss after masks and rollout weights
    kl: Tensor | None  # before its coefficient
    rollout_weight: Tensor | None  # None: no correction
    distill_kl: Tensor | None = None  # log p_old - log p_teacher, 0 where not finite; None: no distillation


def token_objective(tokens: Tokens, objective: Objective) -> TokenObjective:
    """The objective of every token; see the module's formula."""
    advantages, distill_kl = tokens.advantages, None
    if tokens.teacher_logprobs is not None:
        distill_kl = finite_difference(tokens.old_logprobs, tokens.teacher_logprobs)
        advantages = advantages + distillation_advantages(
            tokens.old_logprobs,
            tokens.teacher_logprobs,
            tokens.response_index,
            coef=objective.distill_coef,
            discount=objective.distill_discount,
        )
    policy = objective.loss(
        tokens.logprobs,
        tokens.old_logprobs,
        advantages,
        tokens.response_index,
        tokens.num_responses,
        objective.options,
    )
    loss, weight = policy.loss, None
    if objective.off_policy_max_kl is not None:
        near = on_policy_enough(
            tokens.logprobs,
            tokens.rollout_logprobs,
            advantages,
            tokens.response_index,
            tokens.num_responses,
            max_kl=objective.off_policy_max_kl,
        )
        loss = loss * near
    if tokens.keep is not None:
        loss = loss * tokens.keep
    if objective.rollout_correction is not None:
        weight = rollout_weights(
            tokens.old_logprobs,
            tokens.rollout_logprobs,
            tokens.response_index,
            tokens.num_responses,
            kind=objective.rollout_correction,
            low=objective.rollout_ratio_low,
            high=objective.rollout_ratio_high,
        )
        loss = loss * weight
    total, kl = loss, None
    if tokens.ref_logprobs is not None:
        kl = KL_ESTIMATORS[objective.kl_estimator](tokens.logprobs, tokens.ref_logprobs)
        if objective.kl_importance_weighted:
            kl = kl * policy.ratio
        total = total + objective.kl_coef * kl
    if objective.entropy_coef:
        total = total - objective.entropy_coef * torch.where(policy.finite, tokens.entropy, 0.0)
    return TokenObjective(total, TokenLoss(loss, policy.clipped, policy.ratio, policy.finite), kl, weight, distill_kl)
