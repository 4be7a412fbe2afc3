"""The part of a causal language model that one pipeline rank holds: some decoder layers, at the ends embedding or head.

The model keeps its structure and its parameters' names; what other ranks hold is taken out and leaves an empty module
in its place. A chunk of layers runs through the base model's own forward (rotary embedding, arguments of the layers),
with the chunk's layers in place of all. For a rollout the absent modules can be filled with weights and put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from covey.models.architectures import architecture, layers_of


@dataclass(frozen=True)
class Weight:
    """A tensor of the whole model, wherever it is; shape and type are those before data parallelism cuts it."""

    owner: int  # a pipeline rank that has it
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class _Part:
    """A module that some pipeline ranks hold."""

    name: str  # in the model
    module: nn.Module
    owners: tuple[int, ...]


def stage_parameters(model: Any, chunks: Sequence[range], num_ranks: int) -> list[tuple[int, int]]:
    """(parameters, trained ones) of every pipeline rank; a tied embedding and head count on both ends."""
    if num_ranks == 1:
        held: list[list[nn.Module]] = [[model]]
    else:
        norm = getattr(model.base_model, architecture(model, f"parallel.pp={num_ranks}").final_norm)
        parts = _parts(model, list(layers_of(model)), chunks, num_ranks, norm)
        held = [[part.module for part in parts if rank in part.owners] for rank in range(num_ranks)]
    found = []
    for mine in held:
        once = {id(p): p for module in mine for p in module.parameters()}.values()
        found.append((sum(p.numel() for p in once), sum(p.numel() for p in once if p.requires_grad)))
    return found


class Stage:
    """One pipeline rank's part of `model`, which is changed in place."""

    def __init__(self, model: Any, chunks: Sequence[range], *, rank: int, num_ranks: int) -> None:
        """chunks: the layers of every chunk of the model; chunk c belongs to rank c modulo num_ranks.

        ValueError for a family that is not known. A tied embedding and head stay on the first and on the last rank.
        """
        self._base: Any = model.base_model
        self._norm_name = architecture(model, f"parallel.pp={num_ranks}").final_norm
        self._num_chunks = len(chunks)
        layers = list(layers_of(model))
        parts = _parts(model, layers, chunks, num_ranks, getattr(self._base, self._norm_name))
        self.weights = _weights(model, parts)  # by name in the state dict
        names = {id(parameter): name for name, parameter in model.named_parameters()}  # tied ones once
        self.parameters = {name: self.weights[name] for name in names.values()}
        head = model.get_output_embeddings().weight
        self.tied = {names[id(head)]} if head is model.get_input_embeddings().weight else set()
        # Not registered with the model, whose own list keeps the names.
        self._layers = {c: nn.ModuleList(layers[i] for i in chunks[c]) for c in range(rank, len(chunks), num_ranks)}
        self._nothing = nn.Identity()
        self._absent = [_Absent(model, part, names) for part in parts if rank not in part.owners]
        for absent in self._absent:
            absent.empty()

    def layers(self, chunk: int | None = None) -> list[nn.Module]:
        """The decoder layers of one of this rank's chunks, or of all."""
        return [layer for c, layers in self._layers.items() if chunk in (None, c) for layer in layers]

    def is_last(self, chunk: int) -> bool:
        """Whether the chunk ends with the norm."""
        return chunk == self._num_chunks - 1

    @contextmanager
    def only(self, chunk: int) -> Iterator[None]:
        """Inside, the base model consists of the chunk's layers, and of the norm when it is the last chunk."""
        layers, norm = self._base.layers, getattr(self._base, self._norm_name)
        self._base.layers = self._layers[chunk]
        if not self.is_last(chunk):
            setattr(self._base, self._norm_name, self._nothing)
        try:
            yield
        finally:
            self._base.layers = layers
            setattr(self._base, self._norm_name, norm)

    @contextmanager
    def whole(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the absent modules are in their places, with `weights` (by parameter name; others stay empty)."""
        for absent in self._absent:
            absent.fill(weights)
        try:
            yield
        finally:
            for absent in self._absent:
                absent.empty()


class _Absent:
    """A module that another rank holds."""

    def __init__(self, model: nn.Module, part: _Part, names: Mapping[int, str]) -> None:
        """names: of the model's parameters, by identity."""
        parent, _, self._child = part.name.rpartition(".")
        self._parent = model.get_submodule(parent)
        self._module = part.module
        self._slots = [
            (module, key, names[id(parameter)])
            for module in part.module.modules()
            for key, parameter in module.named_parameters(recurse=False)
        ]

    def empty(self) -> None:
        """Take the module out and free its weights."""
        setattr(self._parent, self._child, nn.Identity())
        for module, key, _ in self._slots:
            parameter = getattr(module, key)
            setattr(module, key, nn.Parameter(parameter.detach().new_empty(0), requires_grad=False))

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Put the module in its place, on top of `weights`."""
        setattr(self._parent, self._child, self._module)
        for module, key, name in self._slots:
            if name in weights:
                setattr(module, key, nn.Parameter(weights[name], requires_grad=False))


def _parts(
    model: Any, layers: Sequence[nn.Module], chunks: Sequence[range], num_ranks: int, final_norm: nn.Module
) -> list[_Part]:
    names = {id(module): name for name, module in model.named_modules()}
    owner = {i: c % num_ranks for c, chunk in enumerate(chunks) for i in chunk}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    last = num_ranks - 1
    first_and_last = (0, last) if head.weight is embedding.weight else None
    owners = [(layer, (owner[i],)) for i, layer in enumerate(layers)]
    owners += [(embedding, first_and_last or (0,)), (final_norm, (last,)), (head, first_and_last or (last,))]
    return [_Part(names[id(module)], module, ranks) for module, ranks in owners]


def _weights(model: nn.Module, parts: Sequence[_Part]) -> dict[str, Weight]:
    found = {}
    for name, tensor in model.state_dict().items():
        owners = [part.owners[0] for part in parts if name.startswith(part.name + ".")]
        found[name] = Weight(owners[0] if owners else 0, tensor.shape, tensor.dtype)
    return found
