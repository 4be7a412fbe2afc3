"""The kernels of packed attention: forward with log-sum-exp, backward from any output and log-sum-exp.

torch's flash kernels on cpu and, in 16 bits, on cuda; plain matrix products elsewhere (fp32 on cuda, npu). Shapes:
query (n, N, L, H), key and value (n, N, S, H), log-sum-exp (n, N, L) fp32. Causal kernels have L = S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kernels:
    """forward(q, k, v, causal, mask, scale) -> (out, lse); backward(grad, q, k, v, out, lse, causal, mask, scale)."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    masks: bool  # takes an additive mask


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(q, k, v, 0.0, causal, attn_mask=None if mask is None else mask.to(q.dtype), scale=scale)


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    mask = None if mask is None else mask.to(q.dtype)
    return flash(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _cuda_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # random state of a dropout that is off
    lengths = q.shape[2], k.shape[2]
    return flash(grad, q, k, v, out, lse, None, None, *lengths, 0.0, causal, unused, unused[0], scale=scale)


def _probabilities(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    """Scaled and masked scores (n, heads, L, S) in fp32."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale)
    if mask is not None:
        scores += mask
    if causal:
        above = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(above, float("-inf"))
    return scores


def _matmul_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _probabilities(q, k, causal, mask, scale)
    lse = torch.logsumexp(scores, -1)
    return torch.matmul(scores.sub_(lse[..., None]).exp_(), v.float()).to(q.dtype), lse


def _matmul_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    probabilities = _probabilities(q, k, causal, mask, scale).sub_(lse[..., None]).exp_()
    grad, out = grad.float(), out.float()
    grad_v = torch.matmul(probabilities.transpose(-1, -2), grad)
    grad_scores = torch.matmul(grad, v.float().transpose(-1, -2)).sub_((grad * out).sum(-1, keepdim=True))
    grad_scores.mul_(probabilities).mul_(scale)
    return torch.matmul(grad_scores, k.float()), torch.matmul(grad_scores.transpose(-1, -2), q.float()), grad_v


_CPU = Kernels(_cpu_forward, _cpu_backward, masks=True)
_CUDA_16_BIT = Kernels(_cuda_forward, _cuda_backward, masks=False)
_MATMUL = Kernels(_matmul_forward, _matmul_backward, masks=True)


def kernels_for(device: torch.device, dtype: torch.dtype | None = None) -> Kernels:
    """The kernels of a device; without a dtype, those with the fewest abilities that it may use."""
    if device.type == "cpu":
        return _CPU
    if device.type == "cuda" and dtype in (None, torch.float16, torch.bfloat16):
        return _CUDA_16_BIT
    return _MATMUL
