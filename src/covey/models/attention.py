"""The one attention function that Covey's models run, registered with transformers as `covey`.

The model is called on one row of packed tokens, `model.model(input_ids=(1, T), position_ids=(1, T), plan=plan,
use_cache=False)`; transformers hands the keyword `plan` to every layer. A plan knows which tokens see which: the
training plan below (`PackedPlan`), or the decode plan of the native rollout engine.

A packed row holds prompts and their responses (`covey.types.Segment`). Its attention is two passes that are merged by
their log-sum-exp: every segment over itself, causal; and all responses of a prompt over that prompt, without a mask.
The backward of each pass takes the merged output and log-sum-exp, which makes its probabilities the final ones
(FlashAttention-2, arXiv:2307.08691, sec. 3.1, uses the same identity between blocks of keys). So a prompt's keys and
values are read once for all responses, and their gradients are summed over the responses in one kernel, in fp32.
Segments of nearly equal length share one call; a call pads to its longest.

Kernels: torch's flash kernels on cpu and (16-bit) cuda; plain matrix products elsewhere, also in fp32 on cuda.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from covey.models.kernels import kernels_for
from covey.types import Segment

ATTENTION = "covey"


class AttentionPlan(Protocol):
    """Who sees whom in a packed row."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention output (T, N, H) for query (N, T, H), key and value (N_kv, T, H), rotary already applied."""
        ...


def attention_forward(
    module: Any,
    query: Tensor,  # (1, N, T, H)
    key: Tensor,  # (1, N_kv, T, H)
    value: Tensor,  # (1, N_kv, T, H)
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    plan: AttentionPlan | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls; returns ((1, T, N, H), None).

    What this attention cannot honour (sliding window, softcap, sinks, dropout) is refused when a model is loaded.
    """
    if plan is None:
        raise ValueError(
            "`covey` attention needs plan=...; for ordinary calls use model.set_attn_implementation('sdpa')"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return plan.attend(module.layer_idx, query[0], key[0], value[0], scale).unsqueeze(0), None


AttentionInterface.register(ATTENTION, attention_forward)


@dataclass
class _Call:
    """One kernel call over n items: query rows (n * L), key rows (n * S), row numbers of the packed batch.

    Items shorter than L or S are padded with row 0; `valid` lists the positions of n * L that are real, None: all.
    """

    num_items: int
    query_rows: Tensor
    key_rows: Tensor
    valid: Tensor | None
    valid_keys: Tensor | None
    mask: Tensor | None  # (n, 1, 1, S) additive, where key lengths differ and the pass is not causal
    causal: bool


class PackedPlan:
    """Training attention over prompts and responses; built once per micro-batch, used by every layer."""

    def __init__(self, segments: list[Segment], device: torch.device) -> None:
        self._calls = [_self_call(bucket, device) for bucket in _buckets([(s.start, s.end) for s in segments])]
        response_rows: dict[int, list[int]] = {}
        for segment in segments:
            if segment.prompt is not None:
                response_rows.setdefault(segment.prompt, []).extend(range(segment.start, segment.end))
        shared = [((segments[p].start, segments[p].end), rows) for p, rows in response_rows.items()]
        self._calls += _cross_calls(shared, device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See AttentionPlan; differentiable."""
        del layer
        return _PackedAttention.apply(query, key, value, self._calls, scale)  # type: ignore[return-value]


def _buckets(spans: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Spans of nearly equal length together: padding at most a fifth of the longest, or 8 rows."""
    buckets: list[list[tuple[int, int]]] = []
    for span in sorted(spans, key=lambda s: (s[0] - s[1], s[0])):
        longest = buckets[-1][0][1] - buckets[-1][0][0] if buckets else 0
        length = span[1] - span[0]
        if buckets and length >= min(0.8 * longest, longest - 8):
            buckets[-1].append(span)
        else:
            buckets.append([span])
    return buckets


def _padded(items: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(rows (n * longest), positions that are real or None) of lists of row numbers, padded with row 0."""
    longest = max(map(len, items))
    rows = [row for item in items for row in (*item, *([0] * (longest - len(item))))]
    valid = [i * longest + j for i, item in enumerate(items) for j in range(len(item))]
    as_tensor = torch.tensor(rows, dtype=torch.int64).to(device)
    return as_tensor, None if len(valid) == len(rows) else torch.tensor(valid, dtype=torch.int64).to(device)


def _self_call(bucket: list[tuple[int, int]], device: torch.device) -> _Call:
    rows, valid = _padded([list(range(start, end)) for start, end in bucket], device)
    return _Call(len(bucket), rows, rows, valid, valid, None, causal=True)


def _cross_calls(shared: list[tuple[tuple[int, int], list[int]]], device: torch.device) -> list[_Call]:
    """Responses over their prompts; one call for prompts of nearly equal length (equal on devices without masks)."""
    by_span = dict(shared)
    calls = []
    for bucket in _buckets(list(by_span)):
        lengths = [end - start for start, end in bucket]
        if len(set(lengths)) > 1 and not kernels_for(device).masks:
            batches = [[span for span in bucket if span[1] - span[0] == n] for n in sorted(set(lengths))]
        else:
            batches = [bucket]
        for batch in batches:
            for part in _similar_rows(batch, by_span):
                query_rows, valid = _padded([by_span[span] for span in part], device)
                key_rows, valid_keys = _padded([list(range(*span)) for span in part], device)
                mask = None
                if valid_keys is not None:
                    mask = torch.full((key_rows.numel(),), float("-inf"), device=device)
                    mask[valid_keys] = 0.0
                    mask = mask.view(len(part), 1, 1, -1)
                calls.append(_Call(len(part), query_rows, key_rows, valid, valid_keys, mask, causal=False))
    return calls


def _similar_rows(
    batch: list[tuple[int, int]], by_span: dict[tuple[int, int], list[int]]
) -> list[list[tuple[int, int]]]:
    """Split prompts so that those of one call have nearly as many response rows."""
    ordered = sorted(batch, key=lambda span: (-len(by_span[span]), span))
    parts: list[list[tuple[int, int]]] = []
    for span in ordered:
        if parts and len(by_span[span]) >= 0.7 * len(by_span[parts[-1][0]]):
            parts[-1].append(span)
        else:
            parts.append([span])
    return parts


class _PackedAttention(torch.autograd.Function):
    """Two-pass attention with merged log-sum-exp. Internally rows come first: (T, N, H)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: list[_Call], scale: float) -> Tensor:
        q, k, v = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        kernels = kernels_for(q.device, q.dtype)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for call in calls:
            qb, kb, vb = _gather(call, q, k, v)
            part_out, part_lse = kernels.forward(qb, kb, vb, call.causal, call.mask, scale)
            rows, part_out, part_lse = _scatter_form(call, part_out, part_lse, q.shape[1])
            if call.causal:  # every row is in exactly one causal call, and those come first
                out[rows], lse[rows] = part_out, part_lse
            else:
                own_out, own_lse = out[rows], lse[rows]
                merged = torch.logaddexp(own_lse, part_lse)
                own_out = (
                    own_out * (own_lse - merged).exp()[..., None] + part_out * (part_lse - merged).exp()[..., None]
                )
                out[rows], lse[rows] = own_out.to(out.dtype), merged
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.calls, ctx.scale = calls, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        kernels = kernels_for(q.device, q.dtype)
        grad_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        grad_k = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
        grad_v = torch.zeros_like(grad_k)
        for call in ctx.calls:
            qb, kb, vb = _gather(call, q, k, v)
            folded = qb.shape[1] != q.shape[1]
            groups = q.shape[1] // k.shape[1]
            gb, ob, lb = (
                _take_queries(call, x, k.shape[1] if folded else None) for x in (grad_out, out, lse[..., None])
            )
            if call.valid is not None:  # padded query rows must not reach the keys' gradients
                gb = _zero_padding(call, gb, q.shape[1], k.shape[1] if folded else None)
            dq, dk, dv = kernels.backward(gb, qb, kb, vb, ob, lb[..., 0], call.causal, call.mask, ctx.scale)
            rows = call.query_rows if call.valid is None else call.query_rows[call.valid]
            grad_q.index_add_(0, rows, _rows_first(dq, q.shape[1], call.valid).float())
            key_rows = call.key_rows if call.valid_keys is None else call.key_rows[call.valid_keys]
            for grad, part in ((grad_k, dk), (grad_v, dv)):
                if not folded and groups > 1:  # keys were repeated for the query heads that share them
                    part = part.unflatten(1, (k.shape[1], groups)).sum(2, dtype=torch.float32)
                grad.index_add_(0, key_rows, _rows_first(part, k.shape[1], call.valid_keys).float())
        to_input = [g.to(x.dtype).transpose(0, 1) for g, x in ((grad_q, q), (grad_k, k), (grad_v, v))]
        return to_input[0], to_input[1], to_input[2], None, None


def _take_queries(call: _Call, x: Tensor, fold_heads: int | None) -> Tensor:
    """Rows of x (T, N, h) as a kernel batch: (n, N, L, h), or (n, N_kv, g * L, h) when heads are folded into rows."""
    batch = x.index_select(0, call.query_rows).view(call.num_items, -1, *x.shape[1:])
    if fold_heads is None:
        return batch.transpose(1, 2)
    folded = batch.unflatten(2, (fold_heads, -1)).permute(0, 2, 3, 1, 4)
    return folded.reshape(call.num_items, fold_heads, -1, x.shape[-1])


def _gather(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel inputs of a call. Without a causal mask the query heads that share a key head become rows of it."""
    num_kv = k.shape[1]
    keys = [x.index_select(0, call.key_rows).view(call.num_items, -1, num_kv, x.shape[-1]) for x in (k, v)]
    if call.causal:
        repeats = q.shape[1] // num_kv
        if repeats > 1:
            keys = [x.repeat_interleave(repeats, dim=2) for x in keys]
        return _take_queries(call, q, None), keys[0].transpose(1, 2), keys[1].transpose(1, 2)
    return _take_queries(call, q, num_kv), keys[0].transpose(1, 2), keys[1].transpose(1, 2)


def _rows_first(x: Tensor, num_heads: int, valid: Tensor | None) -> Tensor:
    """(n, heads, L, h), possibly with folded heads, to real rows (rows, num_heads, h)."""
    n, heads, _, width = x.shape
    if heads != num_heads:
        x = x.reshape(n, heads, num_heads // heads, -1, width).flatten(1, 2)
    rows = x.transpose(1, 2).reshape(-1, num_heads, width)
    return rows if valid is None else rows.index_select(0, valid)


def _scatter_form(call: _Call, out: Tensor, lse: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = call.query_rows if call.valid is None else call.query_rows[call.valid]
    return rows, _rows_first(out, num_heads, call.valid), _rows_first(lse[..., None], num_heads, call.valid)[..., 0]


def _zero_padding(call: _Call, grad: Tensor, num_heads: int, fold_heads: int | None) -> Tensor:
    real = torch.zeros(call.query_rows.numel(), 1, 1, dtype=grad.dtype, device=grad.device)
    real[call.valid] = 1.0
    real = real.view(call.num_items, 1, -1, 1)
    if fold_heads is None:
        return grad * real
    return grad * real.repeat(1, 1, num_heads // fold_heads, 1)
