"""Importance weights for a rollout engine whose log-probabilities are not the training model's.

The engine (another kernel, another precision, a cut-off distribution) sampled from q; training computes p_old for the
same weights. Multiplying a token's loss by p_old / q corrects for it; the weights are bounded because products of many
small errors are not. Sources: truncated weights, Yao et al. 2025 (https://fengyao.notion.site/off-policy-rl); masked
weights, IcePop (Ling team 2025) per token and Liu et al. 2025 per sequence; TRL's `vllm_importance_sampling_*` modes.

Not here: resampling, and dropping responses from the denominators (a masked token or response still counts there).
"""

from __future__ import annotations

import torch
from torch import Tensor

from covey.algorithm.kl import MAX_LOG_RATIO

CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask")


def rollout_weights(
    old_logprobs: Tensor,  # (n,) log p_old by the training model
    rollout_logprobs: Tensor,  # (n,) log q, as the engine reported it
    response_index: Tensor,  # (n,) int64, 0..num_responses-1
    num_responses: int,
    *,
    kind: str,
    low: float | None,
    high: float,
) -> Tensor:
    """(n,) weight of each token's loss, without gradient.

    | kind | ratio | outside [low, high] |
    |---|---|---|
    | token_truncate | p_old / q of the token | held at the bound |
    | token_mask | the same | 0 |
    | sequence_truncate | product over the response's tokens | held at the bound |
    | sequence_mask | the same | 0 |
    | geometric_mask | the geometric mean over the response's tokens decides, the token's own ratio is used | 0 |

    `low` None: no lower bound. A token without a finite log-probability has log-ratio 0. ValueError: unknown kind.
    """
    if kind not in CORRECTIONS:
        raise ValueError(f"algorithm.rollout_correction={kind!r} is unknown; known: {', '.join(CORRECTIONS)}")
    log_ratio = finite_difference(old_logprobs, rollout_logprobs)
    level, action = kind.split("_")
    token = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    if level == "token":
        ratio = token
    else:
        total = response_sum(log_ratio, response_index, num_responses)
        if level == "geometric":
            total = total / response_sum(torch.ones_like(log_ratio), response_index, num_responses).clamp(min=1.0)
        ratio = torch.exp(total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).index_select(0, response_index)
    if action == "truncate":
        return ratio.clamp(min=low, max=high)
    inside = (ratio <= high) & (ratio >= (0.0 if low is None else low))
    return torch.where(inside, token if level == "geometric" else ratio, 0.0)


def on_policy_enough(
    logprobs: Tensor,  # (n,) under the policy being trained
    sampled_logprobs: Tensor,  # (n,) rollout logprobs, or old logprobs where there are none
    advantages: Tensor,  # (n,)
    response_index: Tensor,
    num_responses: int,
    *,
    max_kl: float,
) -> Tensor:
    """(n,) bool: False for tokens of bad responses (advantage < 0) that the policy has moved away from.

    A response's distance is the mean of sampled - current log-probability over its tokens.
    Source: off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556 sec. 3.1; TRL's `off_policy_mask_threshold`.
    """
    difference = finite_difference(sampled_logprobs, logprobs)
    count = response_sum(torch.ones_like(difference), response_index, num_responses).clamp(min=1.0)
    distance = (response_sum(difference, response_index, num_responses) / count).index_select(0, response_index)
    return (advantages >= 0) | (distance <= max_kl)


def high_entropy_tokens(entropy: Tensor, *, share: float) -> Tensor:
    """(N,) bool: the given share of tokens with the highest entropy, of all tokens of an optimizer step.

    Tokens tied with the threshold (the linearly interpolated quantile 1 - share) are kept.
    Source: "Beyond the 80/20 rule", arXiv:2506.01939 sec. 5; TRL's `top_entropy_quantile`, which takes the quantile
    over a micro-batch and so depends on its size.
    """
    if share >= 1.0 or entropy.numel() == 0:
        return torch.ones_like(entropy, dtype=torch.bool)
    return entropy >= _quantile(entropy, 1.0 - share)


def finite_difference(left: Tensor, right: Tensor) -> Tensor:
    """(n,) left - right without gradient; 0 where either is not finite."""
    difference = left.detach() - right.detach()
    return torch.where(torch.isfinite(difference), difference, 0.0)


def response_sum(values: Tensor, response_index: Tensor, num_responses: int) -> Tensor:
    """(num_responses,) sum of the values (n,) of each response."""
    return torch.zeros(num_responses, dtype=values.dtype, device=values.device).index_add(0, response_index, values)


def _quantile(values: Tensor, q: float) -> Tensor:
    """Linearly interpolated quantile; torch.quantile refuses more than 2^24 values."""
    ordered = values.float().sort().values
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], position - below)
