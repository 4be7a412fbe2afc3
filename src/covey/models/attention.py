"""The one attention function that Covey's models run, registered with transformers as `covey`.

The model is called on one row of packed tokens, `model.model(input_ids=(1, T), position_ids=(1, T), plan=plan,
use_cache=False)`; transformers hands the keyword `plan` to every layer. A plan knows which tokens see which: the
training plan below (`PackedPlan`), or the decode plan of the native rollout engine.

A packed row holds prompts and their responses (`covey.types.Segment`). Its attention is two passes that are merged by
their log-sum-exp: every segment over itself, causal; and all responses of a prompt over that prompt, without a mask.
The backward of each pass takes the merged output and log-sum-exp, which makes its probabilities the final ones
(FlashAttention-2, arXiv:2307.08691, sec. 3.1, uses the same identity between blocks of keys). So a prompt's keys and
values are read once for all responses, their gradients are summed over the responses inside one kernel, and the two
passes' gradients in fp32.

Each pass is variable-length attention, as in `varlen_attention`, on the device's back end (`covey.models.kernels`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from covey.models.kernels import Backend, backend_for
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


def varlen_attention(
    query: Tensor,  # (Tq, N, H)
    key: Tensor,  # (Tk, N_kv, H)
    value: Tensor,  # (Tk, N_kv, H)
    *,
    lens_q: Sequence[int],
    lens_k: Sequence[int],
    scale: float,
    causal: bool = True,
    reference: bool = False,
) -> Tensor:
    """Attention (Tq, N, H) of sequences one after another: lens_q[i] rows of query over lens_k[i] rows of key.

    The causal mask is aligned at the bottom right: the last query of a sequence sees all of its keys. Differentiable.
    Example: lens_q [2], lens_k [3]: query 0 sees keys 0 and 1, query 1 sees all three. reference: by matrix products.
    ValueError when the lengths do not fit.
    """
    short = [i for i, (q, k) in enumerate(zip(lens_q, lens_k, strict=True)) if k < (q if causal else 1) or q < 1]
    if short or (sum(lens_q), sum(lens_k)) != (query.shape[0], key.shape[0]):
        raise ValueError(
            f"lens_q {list(lens_q)} and lens_k {list(lens_k)} for {query.shape[0]} query and {key.shape[0]} key rows: "
            f"they must add up to the rows, and a query row must see a key (sequences {short} do not)"
        )
    backend = backend_for(query.device, query.dtype, reference=reference)
    prepared = backend.prepare(lens_q, lens_k, causal=causal, device=query.device)
    return _MergedAttention.apply(query, key, value, [_Pass(prepared)], backend, scale)  # type: ignore[return-value]


def attend_by_reference(model: Any, reference: bool) -> None:
    """Whether plans for `model` attend by matrix products (model.kernels: reference)."""
    model.covey_reference_attention = reference


def attends_by_reference(model: Any) -> bool:
    """What attend_by_reference has set."""
    return getattr(model, "covey_reference_attention", False)


@dataclass(frozen=True)
class _Pass:
    """One call of a back end over some rows of the batch.

    rows: those that take part, in the order of the call; None: all of them, in order. places: for every row of the
    batch its place among those, or their number where it takes no part.
    """

    prepared: Any
    query_rows: Tensor | None = None
    query_places: Tensor | None = None
    key_rows: Tensor | None = None
    key_places: Tensor | None = None


class PackedPlan:
    """Training attention over prompts and responses; built once per micro-batch, used by every layer."""

    def __init__(self, segments: list[Segment], device: torch.device, *, reference: bool = False) -> None:
        """segments: cover the row, in order. reference: attend by matrix products."""
        self._segments = segments
        self._device = device
        self._reference = reference
        self._made: tuple[Backend, list[_Pass]] | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See AttentionPlan; differentiable."""
        del layer
        if self._made is None:
            backend = backend_for(self._device, query.dtype, reference=self._reference)
            self._made = backend, _passes(self._segments, backend, self._device)
        backend, passes = self._made
        rows_first = (x.transpose(0, 1) for x in (query, key, value))
        return _MergedAttention.apply(*rows_first, passes, backend, scale)  # type: ignore[return-value]


def _passes(segments: list[Segment], backend: Backend, device: torch.device) -> list[_Pass]:
    own = [segment.end - segment.start for segment in segments]
    passes = [_Pass(backend.prepare(own, own, causal=True, device=device))]
    responses: dict[int, list[int]] = {}  # rows that continue a prompt, by the prompt's segment
    for segment in segments:
        if segment.prompt is not None:
            responses.setdefault(segment.prompt, []).extend(range(segment.start, segment.end))
    if responses:
        prompts = [segments[p] for p in responses]
        lens_q = [len(rows) for rows in responses.values()]
        lens_k = [prompt.end - prompt.start for prompt in prompts]
        query_rows = [row for rows in responses.values() for row in rows]
        key_rows = [row for prompt in prompts for row in range(prompt.start, prompt.end)]
        prepared = backend.prepare(lens_q, lens_k, causal=False, device=device)
        total = segments[-1].end
        places = (_rows_and_places(rows, total, device) for rows in (query_rows, key_rows))
        passes.append(_Pass(prepared, *next(places), *next(places)))
    return passes


def _rows_and_places(rows: list[int], total: int, device: torch.device) -> tuple[Tensor, Tensor]:
    chosen = torch.tensor(rows, dtype=torch.int64)
    places = torch.full((total,), len(rows), dtype=torch.int64)
    places[chosen] = torch.arange(len(rows))
    return chosen.to(device), places.to(device)


class _MergedAttention(torch.autograd.Function):
    """Attention (T, N, H) merged from passes, of which the first covers every row."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, passes: list[_Pass], backend: Backend, scale: float
    ) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out, lse = backend.forward(q, k, v, passes[0].prepared, scale)
        for p in passes[1:]:
            keys = _take(k, p.key_rows), _take(v, p.key_rows)
            part_out, part_lse = backend.forward(_take(q, p.query_rows), *keys, p.prepared, scale)
            part_out, part_lse = _spread(part_out, p.query_places), _spread(part_lse, p.query_places, float("-inf"))
            merged = torch.logaddexp(lse, part_lse)
            own, other = (lse - merged).exp()[..., None], (part_lse - merged).exp()[..., None]
            out, lse = (out * own + part_out * other).to(q.dtype), merged
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.passes, ctx.backend, ctx.scale = passes, backend, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_out = grads[0].contiguous()
        sums: list[Tensor] = []
        for p in ctx.passes:
            queries = (_take(x, p.query_rows) for x in (grad_out, q))
            keys = (_take(x, p.key_rows) for x in (k, v))
            found = ctx.backend.backward(
                *queries, *keys, _take(out, p.query_rows), _take(lse, p.query_rows), p.prepared, ctx.scale
            )
            whole = [
                _spread(part.float(), places)
                for part, places in zip(found, (p.query_places, p.key_places, p.key_places), strict=True)
            ]
            sums = whole if not sums else [total.add_(part) for total, part in zip(sums, whole, strict=True)]
        return *(total.to(x.dtype) for total, x in zip(sums, (q, k, v), strict=True)), None, None, None


def _take(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _spread(x: Tensor, places: Tensor | None, fill: float = 0.0) -> Tensor:
    """The rows of a pass at their places in the batch, `fill` elsewhere; by index_select, which every device has."""
    if places is None:
        return x
    return torch.cat([x, x.new_full((1, *x.shape[1:]), fill)]).index_select(0, places)
