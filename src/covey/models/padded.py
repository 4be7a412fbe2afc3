"""Variable-length attention by padding: sequences of nearly equal length share one call of a dense kernel.

A dense kernel works on (n, heads, length, H) with additive masks: torch's flash kernel on cpu, or matrix products
anywhere. Rows are gathered into calls and put back by `index_select`, which every device has. Without a causal mask,
the query heads that share a key head become rows of it, so that keys are read once; otherwise keys are repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DenseKernel:
    """forward(q, k, v, causal, mask, scale) -> (out, lse); backward(grad, q, k, v, out, lse, causal, mask, scale).

    q (n, N, L, H), k and v (n, N, S, H), lse (n, N, L) fp32, mask additive or None. causal: L = S, without a mask.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class _Call:
    """One kernel call over n sequences: query rows (n * L), key rows (n * S), row numbers of the packed tensors.

    Sequences shorter than L or S are padded with row 0; `valid` lists the positions that are real, None: all.
    """

    num_items: int
    query_rows: Tensor
    key_rows: Tensor
    valid: Tensor | None
    valid_keys: Tensor | None
    real: Tensor | None  # (n, 1, L, 1) bool, False where a query row is padding
    mask: Tensor | None
    causal: bool
    fold: bool  # query heads of one key head as rows of it


@dataclass(frozen=True)
class PaddedCalls:
    """All calls; `query_order` and `key_order` put the rows of their results back in order, None: they are."""

    calls: list[_Call]
    query_order: Tensor | None
    key_order: Tensor | None


def prepare(lens_q: Sequence[int], lens_k: Sequence[int], *, causal: bool, device: torch.device) -> PaddedCalls:
    """Calls for sequences of these lengths, one after another; a causal mask is aligned at the bottom right."""
    query_spans, key_spans = _spans(lens_q), _spans(lens_k)
    calls, query_order, key_order = [], [], []
    for chosen in _buckets(lens_q, lens_k):
        queries = [query_spans[i] for i in chosen]
        keys = [key_spans[i] for i in chosen]
        calls.append(_call(queries, keys, causal, device))
        query_order += [row for span in queries for row in span]
        key_order += [row for span in keys for row in span]
    return PaddedCalls(calls, _inverse(query_order, device), _inverse(key_order, device))


def forward(
    kernel: DenseKernel, q: Tensor, k: Tensor, v: Tensor, prepared: PaddedCalls, scale: float
) -> tuple[Tensor, Tensor]:
    """(out (Tq, N, H), log-sum-exp (Tq, N) fp32) of q (Tq, N, H), k and v (Tk, N_kv, H)."""
    outs, lses = [], []
    for call in prepared.calls:
        out, lse = kernel.forward(*_gather(call, q, k, v), call.causal, call.mask, scale)
        outs.append(_rows_first(out, q.shape[1], call.valid))
        lses.append(_rows_first(lse[..., None], q.shape[1], call.valid)[..., 0])
    return _ordered(outs, prepared.query_order), _ordered(lses, prepared.query_order)


def backward(
    kernel: DenseKernel,
    grad: Tensor,  # (Tq, N, H)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    prepared: PaddedCalls,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; those of keys that query heads share are summed in fp32."""
    num_heads, num_kv = q.shape[1], k.shape[1]
    parts: tuple[list[Tensor], ...] = ([], [], [])
    for call in prepared.calls:
        gb, ob, lb = (_take_queries(call, x, num_kv) for x in (grad, out, lse[..., None]))
        if call.real is not None:  # padded query rows must not reach the keys' gradients
            gb = torch.where(call.real.repeat(1, 1, num_heads // num_kv, 1) if call.fold else call.real, gb, 0.0)
        dq, dk, dv = kernel.backward(gb, *_gather(call, q, k, v), ob, lb[..., 0], call.causal, call.mask, scale)
        parts[0].append(_rows_first(dq, num_heads, call.valid))
        for grads, part in zip(parts[1:], (dk, dv), strict=True):
            if part.shape[1] != num_kv:  # keys were repeated for the query heads that share them
                part = part.unflatten(1, (num_kv, -1)).sum(2, dtype=torch.float32)
            grads.append(_rows_first(part, num_kv, call.valid_keys))
    return (
        _ordered(parts[0], prepared.query_order),
        _ordered(parts[1], prepared.key_order),
        _ordered(parts[2], prepared.key_order),
    )


def _spans(lens: Sequence[int]) -> list[range]:
    spans, start = [], 0
    for length in lens:
        spans.append(range(start, start + length))
        start += length
    return spans


def _buckets(lens_q: Sequence[int], lens_k: Sequence[int]) -> list[list[int]]:
    """Sequences of nearly equal lengths together: at most a fifth of the keys and three tenths of the queries padded.

    Where that is less than 8 rows, 8 rows.
    """
    buckets: list[list[int]] = []
    for similar_keys in _similar(range(len(lens_k)), lens_k, 0.8):
        buckets += _similar(similar_keys, lens_q, 0.7)
    return buckets


def _similar(items: Sequence[int], lens: Sequence[int], share: float) -> list[list[int]]:
    groups: list[list[int]] = []
    for i in sorted(items, key=lambda i: (-lens[i], i)):
        longest = lens[groups[-1][0]] if groups else 0
        if groups and lens[i] >= min(share * longest, longest - 8):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _call(queries: list[range], keys: list[range], causal: bool, device: torch.device) -> _Call:
    query_rows, valid = _padded(queries, device)
    key_rows, valid_keys = _padded(keys, device)
    square = all(len(q) == len(k) for q, k in zip(queries, keys, strict=True))
    mask = None
    if causal and not square:
        mask = _bottom_right(queries, keys).to(device)
    elif not causal and valid_keys is not None:
        longest = max(map(len, keys))
        visible = torch.tensor([len(k) for k in keys])[:, None] > torch.arange(longest)
        mask = _additive(visible)[:, None, None].to(device)
    real = None
    if valid is not None:
        real = torch.tensor([len(q) for q in queries])[:, None] > torch.arange(max(map(len, queries)))
        real = real[:, None, :, None].to(device)
    return _Call(len(queries), query_rows, key_rows, valid, valid_keys, real, mask, causal and square, not causal)


def _bottom_right(queries: list[range], keys: list[range]) -> Tensor:
    """(n, 1, L, S) additive: row i of a sequence with Lq queries and Lk keys sees keys 0 .. i + Lk - Lq."""
    longest_q, longest_k = max(map(len, queries)), max(map(len, keys))
    ahead = torch.tensor([len(k) - len(q) for q, k in zip(queries, keys, strict=True)])
    last = torch.minimum(torch.arange(longest_q) + ahead[:, None], torch.tensor([len(k) - 1 for k in keys])[:, None])
    return _additive(torch.arange(longest_k) <= last[..., None])[:, None]


def _additive(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))


def _padded(spans: list[range], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(rows (n * longest), positions that are real or None), padded with row 0."""
    longest = max(map(len, spans))
    rows = [row for span in spans for row in (*span, *([0] * (longest - len(span))))]
    valid = [i * longest + j for i, span in enumerate(spans) for j in range(len(span))]
    as_tensor = torch.tensor(rows, dtype=torch.int64).to(device)
    return as_tensor, None if len(valid) == len(rows) else torch.tensor(valid, dtype=torch.int64).to(device)


def _inverse(order: list[int], device: torch.device) -> Tensor | None:
    """For every row its place in `order`; None when that is the row itself."""
    if order == list(range(len(order))):
        return None
    inverse = torch.empty(len(order), dtype=torch.int64)
    inverse[torch.tensor(order)] = torch.arange(len(order))
    return inverse.to(device)


def _ordered(parts: list[Tensor], order: Tensor | None) -> Tensor:
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole if order is None else whole.index_select(0, order)


def _take_queries(call: _Call, x: Tensor, num_kv: int) -> Tensor:
    """Rows of x (Tq, N, h) as a kernel batch: (n, N, L, h), or (n, N_kv, g * L, h) with heads folded into rows."""
    batch = x.index_select(0, call.query_rows).view(call.num_items, -1, *x.shape[1:])
    if not call.fold:
        return batch.transpose(1, 2)
    folded = batch.unflatten(2, (num_kv, -1)).permute(0, 2, 3, 1, 4)
    return folded.reshape(call.num_items, num_kv, -1, x.shape[-1])


def _gather(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Kernel inputs of a call."""
    num_kv = k.shape[1]
    keys = [x.index_select(0, call.key_rows).view(call.num_items, -1, num_kv, x.shape[-1]) for x in (k, v)]
    if not call.fold and (repeats := q.shape[1] // num_kv) > 1:
        keys = [x.repeat_interleave(repeats, dim=2) for x in keys]
    return _take_queries(call, q, num_kv), keys[0].transpose(1, 2), keys[1].transpose(1, 2)


def _rows_first(x: Tensor, num_heads: int, valid: Tensor | None) -> Tensor:
    """(n, heads, L, h), possibly with folded heads, to real rows (rows, num_heads, h)."""
    heads, width = x.shape[1], x.shape[3]
    if heads != num_heads:
        x = x.reshape(x.shape[0], heads, num_heads // heads, -1, width).flatten(1, 2)
    rows = x.transpose(1, 2).reshape(-1, num_heads, width)
    return rows if valid is None else rows.index_select(0, valid)
