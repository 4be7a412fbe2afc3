"""A checkpoint's safetensors, read in rectangles, so that a rank reads only the pieces that it will hold.

A model for this is built without memory (`without_memory`) and filled after it has been cut and sharded
(`covey.parallel`). Host memory: pages of the mapped file, which the system may drop, and one piece at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils.hub import cached_file

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """The tensors of a Hugging Face directory or hub id, by name."""

    def __init__(self, files: dict[str, Path]) -> None:
        """files: where each tensor is."""
        self._files = files

    @classmethod
    def of(cls, path: str) -> WeightFiles | None:
        """The files of a checkpoint; None when it is not stored as safetensors."""
        index = _find(path, _INDEX)
        if index is not None:
            table: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            places = {name: _find(path, name) for name in sorted(set(table.values()))}
            if missing := [name for name, place in places.items() if place is None]:
                raise ValueError(f"model.path: {path}: {_INDEX} names {missing[0]}, which is not there: copy it again")
            return cls({tensor: place for tensor, name in table.items() if (place := places[name]) is not None})
        single = _find(path, _SINGLE)
        if single is None:
            return None
        with safe_open(single, framework="pt") as file:
            return cls(dict.fromkeys(file.keys(), single))

    def lacks(self, names: Iterable[str]) -> list[str]:
        """Those of the names that no file has."""
        return [name for name in names if name not in self._files]

    def forms(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Every tensor's numbers, as safetensors spells them (F32, BF16, ...), and shape; only headers are read."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for path in sorted(set(self._files.values())):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    part = file.get_slice(name)
                    found[name] = (part.get_dtype(), tuple(part.get_shape()))
        return found

    def read(self, wanted: dict[str, tuple[slice, ...]]) -> Iterator[tuple[str, Tensor]]:
        """The rectangles of the named tensors on the cpu, in the numbers they are stored in, file by file."""
        by_file: dict[Path, list[str]] = {}
        for name in wanted:
            by_file.setdefault(self._files[name], []).append(name)
        for path, names in by_file.items():
            with safe_open(path, framework="pt") as file:
                for name in names:
                    yield name, file.get_slice(name)[wanted[name]]


@contextmanager
def without_memory() -> Iterator[None]:
    """Inside, modules are built with parameters on the meta device; buffers, which no checkpoint has, are real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one that is on meta may be tied: keep its identity
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def allocate(root: nn.Module, device: torch.device) -> None:
    """Give every tensor of `root` that is on meta its memory, with undefined numbers; the others move to the device."""
    real = {
        name: tensor.detach().clone()
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]
        if not tensor.is_meta
    }
    root.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
            if name in real:
                tensor.copy_(real[name])


def weight_files_of(model: Any) -> WeightFiles | None:
    """Where the numbers of a model without memory are; None for a model that has its own."""
    return getattr(model, "covey_weight_files", None)


def _find(path: str, name: str) -> Path | None:
    found = cached_file(
        path,
        name,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)
