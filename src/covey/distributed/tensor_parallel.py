"""Tensor parallelism: every matrix of a decoder cut over ranks, with plain autograd functions around the cuts.

Megatron-LM's scheme (arXiv:1909.08053 sec. 3): q, k, v, gate and up keep some output channels, o and down the matching
input channels, so that a block needs one sum over ranks in forward (`leave`) and one in backward (`enter`). With
sequence parallelism (arXiv:2205.05198 sec. 4.2) the tokens between blocks are cut too: the sum becomes a reduce-scatter
over tokens and its counterpart an all-gather, for the same traffic and 1/tp of the norms' activations. Embedding and
head are cut by vocabulary (`vocabulary.py`). Parameters stay ordinary local tensors, so FSDP2 shards them further, and
nothing here depends on DTensor's dispatch.

A repeated weight whose gradient is only this rank's share is listed in `TensorParallel.partial`: its gradient is summed
over ranks once per optimizer step. Such are head norms and the A of an adapter whose B is cut, and with sequence
parallelism all norms, the biases after a sum and the B of the other adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from covey.distributed.agreement import agree
from covey.distributed.collectives import sum_tensor
from covey.distributed.mesh import Mesh, ProcessGroup
from covey.distributed.pieces import Cut


class LayerPlan(Protocol):
    """What is cut in a decoder layer, by names relative to it (covey.models.architectures.Architecture)."""

    @property
    def attention(self) -> str:
        """The attention block."""
        ...

    @property
    def mlp(self) -> str:
        """The feed-forward block."""
        ...

    @property
    def norms(self) -> Sequence[str]:
        """Norms before the blocks."""
        ...

    @property
    def column(self) -> Sequence[str]:
        """Linear layers that keep some output channels."""
        ...

    @property
    def row(self) -> Sequence[str]:
        """Linear layers that keep some input channels."""
        ...

    @property
    def head_norms(self) -> Sequence[str]:
        """Norms of single heads."""
        ...


class TensorParallel:
    """The cuts of one model, and how activations cross them."""

    def __init__(self, mesh: Mesh, *, sequence_parallel: bool) -> None:
        self.group: ProcessGroup = mesh.tp_group
        self.rank, self.size = mesh.tp_rank, mesh.tp
        self.sequence = sequence_parallel  # tokens between blocks are cut; a rollout switches it off
        self.cuts: dict[str, Cut] = {}  # parameter name -> how it was cut
        self.partial: set[str] = set()  # repeated parameters whose gradients are shares

    def bounds(self, total: int) -> tuple[int, int]:
        """This rank's range of `total` channels or rows."""
        return self.rank * total // self.size, (self.rank + 1) * total // self.size

    def enter(self, x: Tensor) -> Tensor:
        """Into a cut block: (1, T / tp or T, D) -> (1, T, D); backward sums the ranks' gradients."""
        return (_GatherTokens if self.sequence else _Copy).apply(x, self.group)  # type: ignore[return-value]

    def leave(self, x: Tensor) -> Tensor:
        """Out of a cut block: the ranks' partial results (1, T, D) summed -> (1, T / tp or T, D)."""
        return (_ScatterTokens if self.sequence else _Sum).apply(x, self.group)  # type: ignore[return-value]

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Without sequence parallelism, for rows of tokens that no number of ranks divides."""
        before, self.sequence = self.sequence, False
        try:
            yield
        finally:
            self.sequence = before

    def sum_partial(self, named_grads: Iterable[tuple[str, Tensor]]) -> None:
        """Sum over ranks the gradients that are shares, in place."""
        grads = [grad for name, grad in named_grads if name in self.partial and grad.numel()]
        if grads:
            flat = torch.cat([grad.flatten() for grad in grads])
            sum_tensor(flat, self.group, what="gradients that tensor-parallel ranks share")
            for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))


def cut_layers(
    model: nn.Module, layers: nn.ModuleList, plan: LayerPlan, final_norm: nn.Module, tp: TensorParallel
) -> None:
    """Cut every decoder layer of `model` in place; the last norm's output is then whole again."""
    names = {id(module): name for name, module in model.named_modules()}
    for layer in layers:
        prefix = names[id(layer)]
        for name in plan.column:
            _cut_column(tp, layer, name, prefix)
        for name in plan.row:
            _cut_row(tp, layer, name, prefix)
        tp.partial |= {f"{prefix}.{name}.weight" for name in plan.head_norms}
        if tp.sequence:
            tp.partial |= {f"{prefix}.{name}.weight" for name in plan.norms}
        for name in (plan.attention, plan.mlp):
            layer.get_submodule(name).register_forward_pre_hook(_enter_hook(tp), with_kwargs=True)
    if tp.sequence:
        tp.partial.add(f"{names[id(final_norm)]}.weight")

    def make_whole(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return tp.enter(output)

    final_norm.register_forward_hook(make_whole)


class RowLinear(nn.Module):
    """A linear layer that has only some input channels; its bias is added once, after the sum over ranks."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, tp: TensorParallel) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        """(1, T, D_in / tp) -> (1, T or T / tp, D)"""
        out = self._tp.leave(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


def whole_tensor(tensor: Tensor, cut: Cut | None, group: ProcessGroup) -> Tensor:
    """A weight or gradient with the parts of all tensor-parallel ranks, on each of them; no gradient."""
    if cut is None or group is None:
        return tensor
    size = dist.get_world_size(group)
    lengths = [(r + 1) * cut.total // size - r * cut.total // size for r in range(size)]
    mine = tensor.detach().movedim(cut.dim, 0).contiguous()
    padded = mine.new_zeros((max(lengths), *mine.shape[1:]))
    padded[: mine.shape[0]] = mine
    parts = [torch.empty_like(padded) for _ in lengths]
    agree("gathering", padded, group, what="the whole of a cut weight or of logits")
    dist.all_gather(parts, padded, group=group)
    whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
    return whole.movedim(0, cut.dim).contiguous()


def _cut_column(tp: TensorParallel, layer: nn.Module, name: str, prefix: str) -> None:
    """Keep some output channels of a linear layer, and of the B of its adapter."""
    linear, down, up = _matrices(layer, name)
    for part in (linear, *up):
        module: Any = layer.get_submodule(part)
        _cut(tp, module, "weight", 0, f"{prefix}.{part}")
        if module.bias is not None:
            _cut(tp, module, "bias", 0, f"{prefix}.{part}")
    tp.partial |= {f"{prefix}.{part}.weight" for part in down}  # A serves this rank's part of B only


def _cut_row(tp: TensorParallel, layer: nn.Module, name: str, prefix: str) -> None:
    """Keep some input channels of a linear layer, and of the A of its adapter, whose outputs are summed too."""
    linear, down, up = _matrices(layer, name)
    for part in (linear, *down):
        module: Any = layer.get_submodule(part)
        _cut(tp, module, "weight", 1, f"{prefix}.{part}")
        parent, _, child = part.rpartition(".")
        setattr(layer.get_submodule(parent), child, RowLinear(module.weight, module.bias, tp))
        if tp.sequence and module.bias is not None:
            tp.partial.add(f"{prefix}.{part}.bias")
    if tp.sequence:
        tp.partial |= {f"{prefix}.{part}.weight" for part in up}  # B sees this rank's tokens only


def _matrices(layer: nn.Module, name: str) -> tuple[str, list[str], list[str]]:
    """Names below `layer` of a linear layer, and of the A and B that peft has put beside it, if it has."""
    module: Any = layer.get_submodule(name)
    if not hasattr(module, "base_layer"):
        return name, [], []
    return (
        f"{name}.base_layer",
        [f"{name}.lora_A.{a}" for a in module.lora_A],
        [f"{name}.lora_B.{b}" for b in module.lora_B],
    )


def _cut(tp: TensorParallel, module: Any, name: str, dim: int, prefix: str) -> None:
    """Keep this rank's part of a parameter; the rest is freed."""
    whole = getattr(module, name)
    start, stop = tp.bounds(whole.shape[dim])
    part = whole.detach().narrow(dim, start, stop - start).clone()
    setattr(module, name, nn.Parameter(part, requires_grad=whole.requires_grad))
    tp.cuts[f"{prefix}.{name}"] = Cut(dim, start, whole.shape[dim])


def _enter_hook(tp: TensorParallel) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (tp.enter(args[0]), *args[1:]), kwargs
        hidden: Tensor = kwargs["hidden_states"]
        return args, {**kwargs, "hidden_states": tp.enter(hidden)}

    return hook


class _Copy(torch.autograd.Function):
    """Forward: nothing. Backward: sum over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous().clone()
        agree("sum", grad, ctx.group, what="gradient at the entry of a cut block")
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """Forward: sum over ranks. Backward: nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        out = x.contiguous().clone()
        agree("sum", out, group, what="output of a cut block")
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherTokens(torch.autograd.Function):
    """Forward: (1, T / tp, D) of all ranks to (1, T, D). Backward: sum over ranks, each keeps its tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grads[0], ctx.group), None


class _ScatterTokens(torch.autograd.Function):
    """Forward: sum over ranks, each keeps its tokens. Backward: gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.group), None


def _gather(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.new_empty((x.shape[1] * dist.get_world_size(group), x.shape[2]))
    agree("gathering", x, group, what="tokens at the border of a cut block")
    dist.all_gather_into_tensor(out, x[0].contiguous(), group=group)
    return out.unsqueeze(0)


def _reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    if x.shape[1] % size:
        raise ValueError(f"sequence parallelism: {x.shape[1]} tokens are not a multiple of tp {size}; pad the batch")
    out = x.new_empty((x.shape[1] // size, x.shape[2]))
    agree("sum of parts", x, group, what="tokens at the border of a cut block")
    dist.reduce_scatter_tensor(out, x[0].contiguous(), group=group)
    return out.unsqueeze(0)
