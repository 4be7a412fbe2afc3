"""Every call of torch_npu's kernels, with the arguments that its defaults get wrong. Imported on npu only.

Facts, from op-plugin's documentation of each function. npu_fusion_attention: scale defaults to 1, not 1 / sqrt(H); the
mask marks what is hidden, and without one the sparse mode is ignored; sequence lengths are running totals in a host
list, at most 1,024 of them in a call; `softmax_layout="TND"` (TorchNPU 7.2, CANN 8.3.RC1) gives maximum and sum row by
row, where the default order is by head. npu_rms_norm: epsilon defaults to 1e-6, whatever the checkpoint says.

Not run on an NPU: arguments are checked against the real package (`make test-npu-schema`) and numbers against torch
twins of its functions (tests/npusim); `covey.models.fused` compares them on the device before they are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
import torch_npu  # pyright: ignore[reportMissingImports]
from torch import Tensor

MAX_SEQUENCES = 1024  # in one call of npu_fusion_attention
MAX_ROWS = 1_000_000
_RIGHT_DOWN_CAUSAL = 3  # sparse mode: a causal mask aligned at the bottom right
_SOFTMAX_WIDTH = 8  # softmax statistics are repeated so many times


@dataclass(frozen=True)
class Part:
    """Consecutive sequences for one call."""

    queries: slice
    keys: slice
    query_ends: list[int]  # running totals of the lengths, without a leading 0
    key_ends: list[int]


@dataclass(frozen=True)
class Parts:
    """All sequences of a pass."""

    parts: list[Part]
    causal: bool


def prepare(lens_q: Sequence[int], lens_k: Sequence[int], *, causal: bool, device: torch.device) -> Parts:
    """Calls for sequences of these lengths: at most MAX_SEQUENCES of them and MAX_ROWS rows in each."""
    del device  # lengths stay on the host
    parts: list[Part] = []
    start_q = start_k = first = 0
    for end in range(1, len(lens_q) + 1):
        full = end == len(lens_q) or end - first == MAX_SEQUENCES
        if full or max(sum(lens_q[first : end + 1]), sum(lens_k[first : end + 1])) > MAX_ROWS:
            query_ends, key_ends = list(accumulate(lens_q[first:end])), list(accumulate(lens_k[first:end]))
            queries, keys = slice(start_q, start_q + query_ends[-1]), slice(start_k, start_k + key_ends[-1])
            parts.append(Part(queries, keys, query_ends, key_ends))
            start_q, start_k, first = queries.stop, keys.stop, end
    return Parts(parts, causal)


def attention_forward(q: Tensor, k: Tensor, v: Tensor, prepared: Parts, scale: float) -> tuple[Tensor, Tensor]:
    """(out (Tq, N, H), log-sum-exp (Tq, N) fp32) of q (Tq, N, H), k and v (Tk, N_kv, H)."""
    outs, lses = [], []
    for part in prepared.parts:
        out, largest, total, *_ = torch_npu.npu_fusion_attention(
            q[part.queries].contiguous(),
            k[part.keys].contiguous(),
            v[part.keys].contiguous(),
            q.shape[1],
            "TND",
            atten_mask=_hidden(q.device) if prepared.causal else None,
            scale=scale,
            keep_prob=1.0,
            actual_seq_qlen=part.query_ends,
            actual_seq_kvlen=part.key_ends,
            sparse_mode=_RIGHT_DOWN_CAUSAL if prepared.causal else 0,
            softmax_layout="TND",
        )
        outs.append(out)
        lses.append(largest[..., 0] + total[..., 0].log())
    return _joined(outs), _joined(lses)


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, prepared: Parts, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v from any output and log-sum-exp.

    The kernel's probabilities are exp(score - maximum) / sum: with the log-sum-exp for the maximum and 1 for the sum
    they are those of the whole softmax, of which this pass may be a part.
    """
    grads: tuple[list[Tensor], ...] = ([], [], [])
    for part in prepared.parts:
        largest = lse[part.queries].unsqueeze(-1).expand(-1, -1, _SOFTMAX_WIDTH).contiguous()
        found = torch_npu.npu_fusion_attention_grad(
            q[part.queries].contiguous(),
            k[part.keys].contiguous(),
            v[part.keys].contiguous(),
            grad[part.queries].contiguous(),
            q.shape[1],
            "TND",
            atten_mask=_hidden(q.device) if prepared.causal else None,
            softmax_max=largest,
            softmax_sum=torch.ones_like(largest),
            attention_in=out[part.queries].contiguous(),
            scale_value=scale,
            keep_prob=1.0,
            actual_seq_qlen=part.query_ends,
            actual_seq_kvlen=part.key_ends,
            sparse_mode=_RIGHT_DOWN_CAUSAL if prepared.causal else 0,
            softmax_layout="TND",
        )
        for tensors, tensor in zip(grads, found[:3], strict=True):
            tensors.append(tensor)
    return _joined(grads[0]), _joined(grads[1]), _joined(grads[2])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis."""
    return torch_npu.npu_rms_norm(x, weight, epsilon=eps)[0]


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q (1, N, T, H) and k (1, N_kv, T, H) turned by cos and sin (1, T, H), which are in [-1, 1].

    Rows come first for the kernel: that is how the tensors lie in memory.
    """
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    turned = [torch_npu.npu_rotary_mul(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k)]
    return turned[0], turned[1]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return torch_npu.npu_swiglu(torch.cat([gate, up], dim=-1), dim=-1)


@lru_cache(maxsize=8)
def _hidden(device: torch.device) -> Tensor:
    """The mask of causal sparse modes, the same for all lengths: True above the diagonal."""
    return torch.triu(torch.ones(2048, 2048, dtype=torch.bool, device=device), diagonal=1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
