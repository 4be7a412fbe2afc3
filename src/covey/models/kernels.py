"""The back ends of packed attention, one row for each device, and what each can honour.

A back end computes variable-length attention with its log-sum-exp, and the gradients from any output and log-sum-exp,
so that `covey.models.attention` can merge passes. Rows: `prepare(lens_q, lens_k, causal=, device=)` once per
micro-batch, `forward(q, k, v, prepared, scale)`, `backward(grad, q, k, v, out, lse, prepared, scale)`; tensors are
(rows, heads, H), sequences one after another, key heads may be fewer than query heads, a causal mask is aligned at the
bottom right.

cpu: torch's flash kernel on padded calls. cuda: torch's flash kernel for variable lengths, in 16 bits. npu:
npu_fusion_attention. Everywhere, also as the reference: matrix products in fp32. Not run on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from covey.models import padded
from covey.models.padded import DenseKernel


@dataclass(frozen=True)
class Backend:
    """One way to compute packed attention, and its limits."""

    name: str
    prepare: Callable[..., Any]
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    max_heads: int | None = None
    note: str = ""

    def describe(self) -> str:
        """One line for the start-up table."""
        limits = [", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)]
        if self.max_head_dim:
            limits.append(f"head size up to {self.max_head_dim}")
        if self.max_heads:
            limits.append(f"up to {self.max_heads} heads")
        return f"{self.name} ({'; '.join([*limits, *([self.note] if self.note else [])])})"

    def refusal(self, dtype: torch.dtype, *, head_dim: int, num_heads: int, num_kv_heads: int) -> str | None:
        """Why this back end cannot run such a model; None when it can."""
        if dtype not in self.dtypes:
            return f"it has no kernel for {str(dtype).removeprefix('torch.')}"
        if self.max_head_dim and head_dim > self.max_head_dim:
            return f"the model's head size is {head_dim}, over {self.max_head_dim}"
        if head_dim % self.head_dim_multiple:
            return f"the model's head size is {head_dim}, not a multiple of {self.head_dim_multiple}"
        if self.max_heads and num_heads > self.max_heads:
            return f"the model has {num_heads} heads, over {self.max_heads}"
        if num_heads % num_kv_heads:
            return f"{num_heads} query heads are not a multiple of {num_kv_heads} key heads"
        return None


def backend_for(device: torch.device, dtype: torch.dtype, *, reference: bool = False) -> Backend:
    """The back end of a device; matrix products where it has no kernel for the numbers, or when they are asked for."""
    if reference:
        return _MATMUL
    if device.type == "npu":
        return _npu()
    if device.type == "cuda":
        return _CUDA if dtype in _CUDA.dtypes else _MATMUL
    return _CPU if device.type == "cpu" else _MATMUL


@dataclass(frozen=True)
class FusedOp:
    """A fused kernel for one of a model's small operations (covey.models.fused has its twin)."""

    name: str
    function: Callable[..., Any]
    max_head_dim: int | None = None  # rotary: the head size must stay below


def fused_ops(device: torch.device) -> dict[str, FusedOp]:
    """The device's kernels by operation: rms_norm(x, weight, eps), rotary(q, k, cos, sin), swiglu(gate, up).

    On cpu there are none.
    """
    if device.type == "npu":
        from covey.models import ascend  # needs torch_npu

        return {
            "rms_norm": FusedOp("npu_rms_norm", ascend.rms_norm),
            "rotary": FusedOp("npu_rotary_mul", ascend.rotary, max_head_dim=896),
            "swiglu": FusedOp("npu_swiglu", ascend.swiglu),
        }
    if device.type == "cuda":
        return {"rms_norm": FusedOp("rms_norm (torch)", _torch_rms_norm)}
    return {}


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


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


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
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
    scores = _scores(q, k, causal, mask, scale)
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
    probabilities = _scores(q, k, causal, mask, scale).sub_(lse[..., None]).exp_()
    grad, out = grad.float(), out.float()
    grad_v = torch.matmul(probabilities.transpose(-1, -2), grad)
    grad_scores = torch.matmul(grad, v.float().transpose(-1, -2)).sub_((grad * out).sum(-1, keepdim=True))
    grad_scores.mul_(probabilities).mul_(scale)
    return torch.matmul(grad_scores, k.float()), torch.matmul(grad_scores.transpose(-1, -2), q.float()), grad_v


@dataclass(frozen=True)
class _FlashLengths:
    """Where sequences start, with the end of the last one, on the device."""

    queries: Tensor  # (n + 1,) int32
    keys: Tensor
    max_q: int
    max_k: int
    causal: bool


def _flash_prepare(
    lens_q: Sequence[int], lens_k: Sequence[int], *, causal: bool, device: torch.device
) -> _FlashLengths:
    queries, keys = (torch.tensor([0, *accumulate(lens)], dtype=torch.int32).to(device) for lens in (lens_q, lens_k))
    return _FlashLengths(queries, keys, max(lens_q), max(lens_k), causal)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, lengths: _FlashLengths, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, lengths.queries, lengths.keys, lengths.max_q, lengths.max_k, 0.0, lengths.causal, False, scale=scale
    )
    return out, lse.t()  # (N, Tq)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: _FlashLengths, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout that is off
    unused = torch.empty(0, device=q.device)
    starts = lengths.queries, lengths.keys, lengths.max_q, lengths.max_k
    return torch.ops.aten._flash_attention_backward(
        grad.contiguous(), q, k, v, out, lse.t().contiguous(), *starts, 0.0, lengths.causal, state, unused, scale=scale
    )


def _npu() -> Backend:
    from covey.models import ascend  # needs torch_npu

    return Backend(
        "npu_fusion_attention, TND",
        ascend.prepare,
        ascend.attention_forward,
        ascend.attention_backward,
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        max_head_dim=768,
        max_heads=256,
        note=f"{ascend.MAX_SEQUENCES} sequences a call",
    )


def _dense(name: str, kernel: DenseKernel) -> Backend:
    forward, backward = partial(padded.forward, kernel), partial(padded.backward, kernel)
    return Backend(name, padded.prepare, forward, backward, (torch.float32, torch.bfloat16, torch.float16))


_CPU = _dense("flash (torch, cpu)", DenseKernel(_cpu_forward, _cpu_backward))
_MATMUL = _dense("matrix products in float32", DenseKernel(_matmul_forward, _matmul_backward))
_CUDA = Backend(
    "flash for variable lengths (torch)",
    _flash_prepare,
    _flash_forward,
    _flash_backward,
    dtypes=(torch.bfloat16, torch.float16),
    max_head_dim=256,
    head_dim_multiple=8,
    note="float32: matrix products",
)
