"""Context parallelism: the packed row of a micro-batch cut over ranks, for sequences too long for one.

Each rank runs its consecutive share of the tokens through the layers. Around attention, and only there, tokens are
exchanged for heads (DeepSpeed Ulysses, arXiv:2309.14509 sec. 3): every rank attends with some heads over the whole row,
so shared prompts and any packing work as on one rank. Key/value heads that the ranks do not divide are repeated first,
one for each query head.

Left out: ring attention, which would lift the limit that ranks divide the query heads.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from covey.distributed.agreement import agree
from covey.distributed.mesh import ProcessGroup


class Plan(Protocol):
    """Who sees whom in a packed row (covey.models.attention.AttentionPlan)."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """(T, N, H) from query (N, T, H), key and value (N_kv, T, H)."""
        ...


class HeadExchange:
    """An attention plan for rank-local tokens that runs `plan` on the whole row with a share of the heads."""

    def __init__(self, plan: Plan, group: ProcessGroup) -> None:
        self._plan = plan
        self._group = group
        self._size = dist.get_world_size(group)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """(T / cp, N, H) from query (N, T / cp, H), key and value (N_kv, T / cp, H)."""
        if key.shape[0] % self._size:
            repeats = query.shape[0] // key.shape[0]
            key, value = (x.repeat_interleave(repeats, 0) for x in (key, value))
        query, key, value = (_Exchange.apply(x, self._group) for x in (query, key, value))
        out = self._plan.attend(layer, query, key, value, scale)  # (T, N / cp, H)
        return _ExchangeBack.apply(out.transpose(0, 1), self._group).transpose(0, 1)  # type: ignore[union-attr]


def combine(local: Tensor, index: Tensor, total: int, group: ProcessGroup) -> Tensor:
    """(total,) on every rank from each rank's values for the places `index`; every place belongs to one rank.

    Every rank computes the same loss from the result, so the gradient goes back without a sum.
    """
    placed = local.new_zeros(total).index_copy(0, index, local)
    return _Combine.apply(placed, group)  # type: ignore[return-value]


class _Exchange(torch.autograd.Function):
    """(N, T / cp, H) -> (N / cp, T, H): this rank's tokens of all heads for all tokens of its heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grads[0], ctx.group), None


class _ExchangeBack(torch.autograd.Function):
    """(N / cp, T, H) -> (N, T / cp, H)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_heads(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(grads[0], ctx.group), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, placed: Tensor, group: ProcessGroup) -> Tensor:
        out = placed.clone()
        agree("sum", out, group, what="results of all tokens of a row")
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _to_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    agree("exchange", x, group, what="tokens for heads")
    dist.all_to_all_single(received, x.contiguous(), group=group)
    heads, tokens = x.shape[0] // size, x.shape[1]  # received: (rank, heads, tokens of that rank, H)
    return received.view(size, heads, tokens, -1).transpose(0, 1).reshape(heads, size * tokens, -1)


def _to_heads(x: Tensor, group: ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    heads, tokens = x.shape[0], x.shape[1] // size
    by_rank = x.reshape(heads, size, tokens, -1).transpose(0, 1).contiguous()
    received = torch.empty_like(by_rank)
    agree("exchange", by_rank, group, what="heads for tokens")
    dist.all_to_all_single(received, by_rank, group=group)  # (rank that has the heads, heads, tokens, H)
    return received.reshape(size * heads, tokens, -1)
