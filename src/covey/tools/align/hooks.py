"""Reads activations while a model runs and changes nothing: forward hooks that copy chosen rows and the norm of all.

Names follow the model's modules. Rungs: `embedding`, `rope`, `layer 0`, ..., `final norm`, `logits` (where the model's
own head runs). Within a layer every module that computes something is a step of its own, in the order of running, so
that a norm, a projection, the attention and the MLP can be told apart; `self_attn.attention` is what goes into o_proj.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covey.models.architectures import layers_of
from covey.tools.align.rows import Place

EMBEDDING, ROPE, FINAL_NORM, LOGITS = "embedding", "rope", "final norm", "logits"
ATTENTION, OUTPUT = "self_attn.attention", "output"
Key = tuple[str, str]  # (rung, name)


@dataclass
class Recorded:
    """A step of the model: chosen rows in its own numbers, and the norm of every row."""

    values: Tensor  # (chosen rows, width)
    norms: Tensor  # (all rows,) fp32
    rows: Tensor  # (chosen rows,) int64, canonical
    seen: Tensor  # (all rows,) bool


class Recorder:
    """Hooks on a causal language model. Before each run of the model, `expect` says what its rows are."""

    def __init__(self, model: Any, *, num_rows: int, rows: np.ndarray, logit_rows: np.ndarray, details: bool) -> None:
        """rows, logit_rows: canonical rows to keep, ascending; details: the steps within layers too."""
        self._model = model
        self._num_rows = num_rows
        self._rows, self._logit_rows = torch.from_numpy(rows), torch.from_numpy(logit_rows)
        self._details = details
        self._queue: deque[tuple[Place, tuple[int, int]]] = deque()
        self._done = torch.zeros(num_rows, dtype=torch.bool)
        self._place: Place | None = None
        self._shape = (0, 0)
        self.found: dict[Key, Recorded] = {}

    def expect(self, place: Place, shape: tuple[int, int]) -> None:
        """The next run of the model has `shape` (batch, positions), and its rows are `place`."""
        self._queue.append((place, shape))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks are on the model inside, and gone afterwards."""
        with ExitStack() as stack:
            for handle in self._hooks():
                stack.callback(handle.remove)
            yield

    def _hooks(self) -> Iterator[Any]:
        base = self._model.base_model
        yield base.register_forward_pre_hook(lambda module, args: self._start(), prepend=True)
        layers = list(layers_of(self._model))
        yield layers[0].register_forward_pre_hook(self._embedding, with_kwargs=True)
        if isinstance(rotary := getattr(base, "rotary_emb", None), nn.Module):
            yield rotary.register_forward_hook(self._rotary)
        for i, layer in enumerate(layers):
            rung = f"layer {i}"
            if self._details:
                yield from self._within(layer, rung)
            yield layer.register_forward_hook(self._output(rung, OUTPUT))
        yield base.register_forward_hook(self._final)
        head = self._model.get_output_embeddings()
        yield head.register_forward_hook(
            lambda module, args, output: self._take(LOGITS, LOGITS, output, self._logit_rows, norms=False)
        )

    def _within(self, layer: nn.Module, rung: str) -> Iterator[Any]:
        for name, module in layer.named_modules():
            leaf = not any(module.children())
            if name and leaf and any(True for _ in module.parameters(recurse=False)):
                if name == "self_attn.o_proj":
                    yield module.register_forward_pre_hook(self._input(rung, ATTENTION))
                yield module.register_forward_hook(self._output(rung, name))

    def _start(self) -> None:
        """A run of the model begins; one that was not announced is not recorded.

        Rows that an earlier run of the same prompt gave are not taken again.
        """
        self._place = None
        if not self._queue:
            return
        place, self._shape = self._queue.popleft()
        new = ~self._done[place.canonical]
        self._place = Place(place.source[new], place.canonical[new])
        self._done[place.canonical] = True

    def _embedding(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._take(EMBEDDING, "embed_tokens", args[0] if args else kwargs["hidden_states"], self._rows)

    def _rotary(self, module: nn.Module, args: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        for name, table in zip(("cos", "sin"), output, strict=True):
            self._take(ROPE, name, table.expand(*self._shape, table.shape[-1]), self._rows, norms=False)

    def _final(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._take(FINAL_NORM, "norm", output.last_hidden_state, self._rows)
        self._take(FINAL_NORM, "hidden of logits", output.last_hidden_state, self._logit_rows, norms=False)

    def _output(self, rung: str, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._take(rung, name, output[0] if isinstance(output, tuple) else output, self._rows)

        return hook

    def _input(self, rung: str, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._take(rung, name, args[0], self._rows)

        return hook

    @torch.no_grad()
    def _take(self, rung: str, name: str, tensor: Tensor, wanted: Tensor, *, norms: bool = True) -> None:
        """Copy the rows of this run that are new."""
        if self._place is None:
            return
        flat = tensor.detach().reshape(self._shape[0] * self._shape[1], -1)
        record = self.found.get((rung, name))
        if record is None:
            record = self.found[rung, name] = Recorded(
                torch.zeros(len(wanted), flat.shape[1], dtype=flat.dtype),
                torch.zeros(self._num_rows if norms else 0),
                wanted,
                torch.zeros(self._num_rows, dtype=torch.bool),
            )
        source, canonical = self._place.source.to(flat.device), self._place.canonical
        if norms:
            record.norms[canonical] = flat.index_select(0, source).float().norm(dim=1).cpu()
        at = torch.searchsorted(wanted, canonical).clamp(max=max(len(wanted) - 1, 0))
        chosen = wanted[at] == canonical
        record.values[at[chosen]] = flat.index_select(0, source[chosen.to(flat.device)]).cpu()
        record.seen[canonical] = True
