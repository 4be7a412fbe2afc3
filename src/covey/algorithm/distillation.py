"""On-policy distillation: the advantage of every token of the policy's own responses, from a teacher's probabilities.

    d_t = log p_teacher - log p_old at the sampled token      A_t = coef (d_t + discount d_t+1 + discount^2 d_t+2 + ..)

The mean of -d_t over tokens is an unbiased estimate of the reverse KL, KL(policy || teacher), at the states that the
policy itself visits. Used as the advantage of a policy loss, with discount 1 its gradient is that of the reverse KL of
whole responses (MiniLLM, arXiv:2306.08543 sec. 2.2); with discount 0 every token answers for itself alone, which has
less variance (GKD with lambda = 1 and reverse KL, arXiv:2306.13649 sec. 3; Thinking Machines Lab, "On-Policy
Distillation", 2025).

Left out: the KL over the whole vocabulary of each position, which needs both models' logits at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from covey.algorithm.correction import finite_difference
from covey.algorithm.kl import MAX_LOG_RATIO


def distillation_advantages(
    old_logprobs: Tensor,  # (n,) log p of the policy that started the update
    teacher_logprobs: Tensor,  # (n,) log p of the teacher
    response_index: Tensor,  # (n,) int64, the tokens of a response in their order and side by side
    *,
    coef: float,
    discount: float,
) -> Tensor:
    """(n,) A_t, without gradient. A d_t that is not finite is 0; beyond +-20 it is held there.

    Example: log p_old [-1, -2, -1], teacher [-2, -1, -1.5], one response, coef 1, discount 0.5: d is [-1, 1, -0.5] and
    the result [-1 + 0.5 (1 - 0.25), 1 - 0.25, -0.5] = [-0.625, 0.75, -0.5].
    """
    gap = finite_difference(teacher_logprobs, old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return coef * discounted_sum(gap, response_index, discount=discount)


def discounted_sum(values: Tensor, response_index: Tensor, *, discount: float) -> Tensor:
    """(n,) each value plus the later ones of its response, every step ahead weighed with one more `discount`.

    By doubling: a sum over `reach` tokens and the one that begins `reach` further on make the sum over twice as many.
    """
    total, reach = values, 1
    while discount and reach < len(values):
        same = response_index[reach:] == response_index[:-reach]
        ahead = torch.where(same, total[reach:] * discount**reach, 0.0)
        total = total + F.pad(ahead, (0, reach))
        reach *= 2
    return total
