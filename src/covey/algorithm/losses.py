"""Policy losses per token: dict LOSSES.

A loss takes the response tokens of one micro-batch as 1-D tensors (n,) in one order. Responses are never split over
micro-batches, so a sequence-level ratio is a mean over the tokens with the same response_index. The result is not
aggregated: see aggregation.py. The masks and terms around it: objective.py.

With A the advantage and r the importance ratio p / p_old; at r = 1 every loss has the gradient -A grad(log p).

Bad numbers. A token whose logprob or old logprob is not finite gets loss 0, no gradient, ratio 1, and
`TokenLoss.finite` False; it still counts in the denominators, which are fixed before the forward pass. A log-ratio
beyond +-20 is held there (no gradient), so that its exponential is finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.algorithm.correction import response_sum
from covey.algorithm.kl import MAX_LOG_RATIO
from covey.algorithm.user_functions import user_function


@dataclass(frozen=True)
class LossOptions:
    """Coefficients of the losses; each loss reads those that its docstring names."""

    clip_low: float  # the ratio is clipped at 1 - clip_low
    clip_high: float  # the ratio is clipped at 1 + clip_high
    sequence_ratio: bool = False  # one ratio for a response, exp(mean log-ratio), instead of one for each token
    dual_clip: float | None = None  # upper limit of the ratio, also where the advantage is negative; None: no limit
    sapo_temperature_pos: float = 1.0  # steepness of SAPO's gate for positive advantages
    sapo_temperature_neg: float = 1.05  # and for the others
    vespo_pos: tuple[float, float] = (2.0, 3.0)  # VESPO's (k, lambda) for advantages >= 0
    vespo_neg: tuple[float, float] = (3.0, 2.0)  # and below 0


@dataclass(frozen=True)
class TokenLoss:
    """What a loss returns, one entry per response token."""

    loss: Tensor  # (n,) to be summed with the token weights
    clipped: Tensor  # (n,) bool: the clip removed this token's gradient (cispo: held its weight)
    ratio: Tensor  # (n,) importance ratio p / p_old as the loss uses it; carries the gradient
    finite: Tensor  # (n,) bool: False for tokens left out because a logprob is not finite


LossFn = Callable[[Tensor, Tensor, Tensor, Tensor, int, LossOptions], TokenLoss]


def grpo(
    logprobs: Tensor,  # (n,) log p under the policy being trained; carries the gradient
    old_logprobs: Tensor,  # (n,) log p under the policy that started this update
    advantages: Tensor,  # (n,) the response's advantage, repeated over its tokens
    response_index: Tensor,  # (n,) int64, 0..num_responses-1
    num_responses: int,
    options: LossOptions,
) -> TokenLoss:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)): the clipped surrogate of PPO.

    With sequence_ratio, r is the response's (then it is `gspo`). With dual_clip, the first r is limited to it: a bound
    where A < 0, nothing new where A > 0 as long as dual_clip >= 1 + clip_high.
    Source: arXiv:1707.06347 eq. 7; clip_high > clip_low is DAPO's clip-higher (arXiv:2503.14476 sec. 3.1); dual clip
    is arXiv:1912.09729 eq. 4 in the form of arXiv:2505.07291 (TRL's `delta`).
    """
    log_ratio, finite = _log_ratio(logprobs, old_logprobs)
    if options.sequence_ratio:
        log_ratio = _response_mean(log_ratio, finite, response_index, num_responses)
    return _clipped_surrogate(_bounded_exp(log_ratio), advantages, finite, options)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_index: Tensor,
    num_responses: int,
    options: LossOptions,
) -> TokenLoss:
    """`grpo` with the response's ratio r = exp(mean over its tokens of log p - log p_old).

    Clips are of another size than per token: the paper uses 3e-4 and 4e-4.
    Source: GSPO, arXiv:2507.18071 eq. 5-7.
    """
    log_ratio, finite = _log_ratio(logprobs, old_logprobs)
    log_ratio = _response_mean(log_ratio, finite, response_index, num_responses)
    return _clipped_surrogate(_bounded_exp(log_ratio), advantages, finite, options)


def gspo_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_index: Tensor,
    num_responses: int,
    options: LossOptions,
) -> TokenLoss:
    """`gspo` in value, each token with the gradient of its own log p: advantages may differ within a response.

    r_t = stop(r) p_t / stop(p_t). With one advantage for a response and `sequence_mean`, the gradient is GSPO's.
    Source: arXiv:2507.18071 eq. 13-15.
    """
    log_ratio, finite = _log_ratio(logprobs, old_logprobs)
    response = _response_mean(log_ratio, finite, response_index, num_responses).detach()
    return _clipped_surrogate(_bounded_exp(response + log_ratio - log_ratio.detach()), advantages, finite, options)


def rloo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_index: Tensor,
    num_responses: int,
    options: LossOptions,
) -> TokenLoss:
    """`grpo` with the response's full ratio r = exp(sum over its tokens of log p - log p_old).

    Meant for `sequence_mean`: every token of a response has the same loss, so the response counts once. On policy the
    gradient is REINFORCE's, -A grad(log p(response)). Source: arXiv:2402.14740 eq. 8, off-policy form as TRL's.
    """
    log_ratio, finite = _log_ratio(logprobs, old_logprobs)
    total = response_sum(log_ratio, response_index, num_responses).index_select(0, response_index)
    return _clipped_surrogate(_bounded_exp(total), advantages, finite, options)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_index: Tensor,
    num_responses: int,
    options: LossOptions,
) -> TokenLoss:
    """-stop(clip(r, 1 - clip_low, 1 + clip_high)) A log p: a clipped weight, but every token keeps a gradient.

    clip_low = 1 means no lower limit, as in the paper. TRL's `epsilon_high` is 1 + clip_high here. Reads
    sequence_ratio. Source: CISPO in MiniMax-M1, arXiv:2506.13585 eq. 4-5.
    """
    log_ratio, finite = _log_ratio(logprobs, old_logprobs)
    if options.sequence_ratio:
        log_ratio = _response_mean(log_ratio, finite, response_index, num_responses)
    ratio = _bounded_exp(log_ratio)
    weight = ratio.detach().clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    loss = -weight * advantages * _selected(logprobs, finite)
    return TokenLoss(torch.where(finite, loss, 0.0), finite & (weight != ratio.detach()), ratio, finite)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_index: Tensor,
    num_responses: int,
    options: LossOptions,
) -> TokenLoss:
    """-(4 / t) sigmoid(t (r - 1)) A: a soft gate instead of a clip; its gradient at r = 1 is PPO's.

    t is sapo_temperature_pos where A > 0, else sapo_temperature_neg. Nothing is ever clipped. Reads sequence_ratio.
    Source: SAPO, arXiv:2511.20347 eq. 5-6.
    """
    log_ratio, finite = _log_ratio(logprobs, old_logprobs)
    if options.sequence_ratio:
        log_ratio = _response_mean(log_ratio, finite, response_index, num_responses)
    ratio = _bounded_exp(log_ratio)
    temperature = torch.where(advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
    loss = -torch.sigmoid(temperature * (ratio - 1.0)) * (4.0 / temperature) * advantages
    return TokenLoss(torch.where(finite, loss, 0.0), torch.zeros_like(finite), ratio, finite)


def reinforce(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_index: Tensor,
    num_responses: int,
    options: LossOptions,
) -> TokenLoss:
    """-A log p: no importance ratio, so exact only for one update on each rollout; reads no option.

    Source: Williams 1992; REINFORCE for language models, arXiv:2402.14740.
    """
    del response_index, num_responses, options
    log_ratio, finite = _log_ratio(logprobs, old_logprobs)
    loss = -advantages * _selected(logprobs, finite)
    return TokenLoss(torch.where(finite, loss, 0.0), torch.zeros_like(finite), _bounded_exp(log_ratio), finite)


def vespo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_index: Tensor,
    num_responses: int,
    options: LossOptions,
) -> TokenLoss:
    """-stop(phi) A log p with phi = w^k exp(lambda (1 - w)), w = exp(sum of the response's log-ratios).

    (k, lambda) is vespo_pos where A >= 0, else vespo_neg; phi is 1 on policy and falls on both sides of w = k / lambda.
    log w is held within [log 1e-8, 20]. Source: VESPO, arXiv:2602.10693 sec. 3; constants and limits as TRL's.
    """
    log_ratio, finite = _log_ratio(logprobs, old_logprobs)
    total = response_sum(log_ratio.detach(), response_index, num_responses).index_select(0, response_index)
    total = total.clamp(torch.log(torch.tensor(1e-8)).item(), MAX_LOG_RATIO)
    positive = advantages >= 0
    power = torch.where(positive, options.vespo_pos[0], options.vespo_neg[0])
    rate = torch.where(positive, options.vespo_pos[1], options.vespo_neg[1])
    phi = torch.exp(rate + power * total - rate * torch.exp(total))
    loss = -phi * advantages * _selected(logprobs, finite)
    return TokenLoss(torch.where(finite, loss, 0.0), torch.zeros_like(finite), _bounded_exp(log_ratio), finite)


LOSSES: dict[str, LossFn] = {
    "grpo": grpo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "rloo": rloo,
    "reinforce": reinforce,
    "vespo": vespo,
}


def find_loss(name: str) -> LossFn:
    """The loss called `name`, or the function at "module:function"; ValueError with the known names without one."""
    return LOSSES[name] if name in LOSSES else user_function("algorithm.loss", name, LOSSES)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, finite: Tensor, options: LossOptions) -> TokenLoss:
    """max(-A min(r, dual_clip), -A clip(r)) and which tokens have no gradient from it."""
    limit = float("inf") if options.dual_clip is None else options.dual_clip
    low, high = 1.0 - options.clip_low, 1.0 + options.clip_high
    loss = torch.maximum(-advantages * ratio.clamp(max=limit), -advantages * ratio.clamp(low, high))
    too_high = ((advantages > 0) & (ratio > min(high, limit))) | ((advantages < 0) & (ratio > limit))
    clipped = too_high | ((advantages < 0) & (ratio < low))
    return TokenLoss(torch.where(finite, loss, 0.0), (clipped & finite).detach(), ratio, finite)


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """(log p - log p_old, both finite); 0 where not. Selected before the subtraction: inf - inf has no gradient."""
    finite = torch.isfinite(logprobs) & torch.isfinite(old_logprobs)
    return _selected(logprobs, finite) - _selected(old_logprobs, finite), finite


def _selected(values: Tensor, finite: Tensor) -> Tensor:
    return torch.where(finite, values, 0.0)


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def _response_mean(values: Tensor, finite: Tensor, response_index: Tensor, num_responses: int) -> Tensor:
    """(n,) mean over the finite tokens of each token's response."""
    count = response_sum(finite.to(values.dtype), response_index, num_responses).clamp(min=1.0)
    return (response_sum(values, response_index, num_responses) / count).index_select(0, response_index)
