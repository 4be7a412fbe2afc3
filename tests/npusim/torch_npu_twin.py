"""torch_npu's functions that Covey calls, in plain torch, with the documented behaviour that is easy to get wrong.

Signatures are those of the real package (`make test-npu-schema` compares them), defaults included: a scale of 1, no
mask whatever the sparse mode says, softmax statistics by head unless another layout is asked for, an epsilon of 1e-6.
Arguments outside the documented limits are a ValueError. Source: op-plugin docs/zh/custom_APIs/torch_npu.
"""

from __future__ import annotations

import importlib.machinery
import types
from typing import Any

import torch
from torch import Tensor

_MAX = 2147483647
_TYPES = (torch.float16, torch.bfloat16, torch.float32)


def module() -> types.ModuleType:
    """In place of the package."""
    made = types.ModuleType("torch_npu")
    made.__spec__ = importlib.machinery.ModuleSpec("torch_npu", loader=None)
    made.__version__ = torch.__version__  # type: ignore[attr-defined]
    for function in (npu_fusion_attention, npu_fusion_attention_grad, npu_rms_norm, npu_rotary_mul, npu_swiglu):
        setattr(made, function.__name__, function)
    return made


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Any = None,
    padding_mask: Any = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _MAX,
    next_tockens: int = _MAX,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Any = None,
    dropout_mask: Any = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Any, ...]:
    """(out, softmax maximum, softmax sum, reserved, seed, offset, length of the dropout mask)."""
    spans = _spans(query, key, value, head_num, input_layout, actual_seq_qlen, actual_seq_kvlen)
    outs, largests, totals = [], [], []
    for rows, columns in spans:
        scores = _scores(query[rows], key[columns], scale, atten_mask, sparse_mode)  # (N, S, Skv)
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        total = weights.sum(-1, keepdim=True)
        outs.append((weights / total @ _heads(value[columns], head_num)).transpose(0, 1))
        largests.append(largest.expand(-1, -1, 8))
        totals.append(total.expand(-1, -1, 8))
    out = torch.cat(outs).to(query.dtype).to(query.device)
    statistics = (_laid_out(x, softmax_layout).to(query.device) for x in (largests, totals))
    return out, *statistics, torch.empty(0), 0, 0, 0


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Any = None,
    padding_mask: Any = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Any = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = _MAX,
    next_tockens: int = _MAX,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Any = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Any = None,
) -> tuple[Any, ...]:
    """(grad of query, of key, of value, of pse, of sink), from probabilities exp(score - maximum) / sum."""
    spans = _spans(query, key, value, head_num, input_layout, actual_seq_qlen, actual_seq_kvlen)
    assert softmax_max is not None
    assert softmax_sum is not None
    assert attention_in is not None
    largests, totals = (_by_head(x, spans, softmax_layout) for x in (softmax_max, softmax_sum))
    grads: tuple[list[Tensor], ...] = ([], [], [])
    for (rows, columns), largest, total in zip(spans, largests, totals, strict=True):
        weights = (_scores(query[rows], key[columns], scale_value, atten_mask, sparse_mode) - largest).exp() / total
        out, grad = (_heads(x[rows], head_num) for x in (attention_in, dy))
        keys, values = (_heads(x[columns], head_num) for x in (key, value))
        of_scores = weights * (grad @ values.transpose(1, 2) - (grad * out).sum(-1, keepdim=True)) * scale_value
        grads[0].append((of_scores @ keys).transpose(0, 1))
        for found, per_head in (
            (grads[1], of_scores.transpose(1, 2) @ _heads(query[rows], head_num)),
            (grads[2], weights.transpose(1, 2) @ grad),
        ):
            found.append(per_head.unflatten(0, (key.shape[1], -1)).sum(1).transpose(0, 1))
    return *(torch.cat(parts).to(query.dtype).to(query.device) for parts in grads), None, torch.empty(0)


def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """(normed, 1 / root mean square); the weight is multiplied before rounding."""
    _on_npu(input, gamma)
    x = input.float()
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    return (x * rstd * gamma.float()).to(input.dtype), rstd


def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Any = None) -> Tensor:
    """input * r1 + rotated input * r2."""
    _on_npu(input, r1, r2)
    if input.dim() != 4 or input.shape[-1] % 2 or input.shape[-1] >= 896 or rotary_mode != "half":
        raise ValueError(f"npu_rotary_mul: shape {tuple(input.shape)}, mode {rotary_mode}: 4-D, even size below 896")
    if any(x != 1 and x != y for x, y in zip(r1.shape, input.shape, strict=True)) or r1.requires_grad:
        raise ValueError(f"npu_rotary_mul: cosines {tuple(r1.shape)} for {tuple(input.shape)}")
    if max(float(r1.abs().max()), float(r2.abs().max())) > 1.0:
        raise ValueError("npu_rotary_mul: cosines and sines are in [-1, 1]")
    first, second = input.chunk(2, -1)
    return input * r1 + torch.cat([-second, first], -1) * r2


def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """silu(first half) * second half."""
    _on_npu(input)
    if not input.is_contiguous() or not input.numel():
        raise ValueError("npu_swiglu: the input must be contiguous and not empty")
    gate, up = input.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def _on_npu(*tensors: Tensor) -> None:
    if wrong := [x.device for x in tensors if x.device.type != "npu"]:
        raise ValueError(f"torch_npu got tensors on {wrong}")


def _spans(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    layout: str,
    query_ends: list[int] | None,
    key_ends: list[int] | None,
) -> list[tuple[slice, slice]]:
    """Rows and columns of every sequence, after the documented limits."""
    _on_npu(query, key, value)
    if layout != "TND" or head_num != query.shape[1] or head_num % key.shape[1] or head_num > 256:
        raise ValueError(f"npu_fusion_attention: layout {layout}, head_num {head_num} for {tuple(query.shape)}")
    if query.dtype not in _TYPES or not query.dtype == key.dtype == value.dtype or key.shape != value.shape:
        raise ValueError(f"npu_fusion_attention: {query.dtype}, {key.dtype}, {value.dtype}")
    for name, ends, rows in (("actual_seq_qlen", query_ends, query), ("actual_seq_kvlen", key_ends, key)):
        if type(ends) is not list or not all(type(end) is int for end in ends) or len(ends) > 1024:
            raise ValueError(f"npu_fusion_attention: {name} is a list of at most 1,024 ints on the host")
        if ends != sorted(ends) or ends[-1] != rows.shape[0]:
            raise ValueError(f"npu_fusion_attention: {name} are running totals up to {rows.shape[0]}, not {ends[-3:]}")
    assert query_ends is not None
    assert key_ends is not None
    if len(query_ends) != len(key_ends):
        raise ValueError(f"npu_fusion_attention: {len(query_ends)} and {len(key_ends)} sequences")
    starts = zip([0, *query_ends], [0, *key_ends], strict=True)
    ends = zip(query_ends, key_ends, strict=True)
    return [(slice(q0, q1), slice(k0, k1)) for (q0, k0), (q1, k1) in zip(starts, ends, strict=False)]


def _heads(rows: Tensor, head_num: int) -> Tensor:
    """(S, N or N_kv, H) on the device to (N, S, H) fp32 on the host."""
    return rows.cpu().float().repeat_interleave(head_num // rows.shape[1], 1).transpose(0, 1)


def _scores(query: Tensor, key: Tensor, scale: float, mask: Tensor | None, sparse_mode: int) -> Tensor:
    """(N, S, Skv) fp32, hidden ones -inf. Without a mask the sparse mode has no effect."""
    scores = _heads(query, query.shape[1]) @ _heads(key, query.shape[1]).transpose(1, 2) * scale
    if mask is None:
        return scores
    if sparse_mode not in (2, 3) or mask.dtype != torch.bool or tuple(mask.shape) != (2048, 2048):
        raise ValueError(f"npu_fusion_attention: sparse mode {sparse_mode} with a mask {tuple(mask.shape)}")
    if bool((mask.cpu() != torch.ones(2048, 2048, dtype=torch.bool).triu(1)).any()):
        raise ValueError("npu_fusion_attention: the compressed mask is True above the diagonal, nowhere else")
    num_rows, num_columns = scores.shape[1:]
    corner = num_columns - num_rows if sparse_mode == 3 else 0
    hidden = torch.arange(num_columns) > torch.arange(num_rows)[:, None] + corner
    return scores.masked_fill(hidden, float("-inf"))


def _laid_out(statistics: list[Tensor], layout: str) -> Tensor:
    """(T, N, 8) from (N, S, 8) of every sequence: row by row as "TND", otherwise head by head of every sequence."""
    if layout == "TND":
        return torch.cat([x.transpose(0, 1) for x in statistics]).contiguous()
    return torch.cat([x.reshape(-1, 8) for x in statistics]).view(-1, statistics[0].shape[0], 8)


def _by_head(x: Tensor, spans: list[tuple[slice, slice]], layout: str) -> list[Tensor]:
    """The reverse of _laid_out, (N, S, 1) each."""
    x, num_heads = x.cpu(), x.shape[1]
    if layout == "TND":
        return [x[rows].transpose(0, 1)[..., :1] for rows, _ in spans]
    parts = x.reshape(-1, 8).split([(rows.stop - rows.start) * num_heads for rows, _ in spans])
    return [part.view(num_heads, -1, 8)[..., :1] for part in parts]
