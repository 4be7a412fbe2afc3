"""The gradient's norm over pieces: every element counts once, whatever axes cut or repeat it.

Sharded weights are cut over the fsdp ranks, those that tensor parallelism cuts also over the tp ranks; a weight that
tp repeats is counted on one of them. Replicas (dp_replicate) hold equal gradients and do not enter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from covey.distributed.collectives import sum_tensor
from covey.distributed.mesh import Mesh


class GradientNorm:
    """Norm of local gradients, the same number on every rank."""

    def __init__(self, mesh: Mesh, tp_cut: Sequence[bool], *, device: torch.device) -> None:
        """tp_cut: for every parameter, whether tensor parallelism cut it."""
        self._mesh = mesh
        self._tp_cut = list(tp_cut)
        self._device = device

    def __call__(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Euclidean norm of the whole gradient from this rank's pieces, in the parameters' order."""
        squares = torch.zeros(2, dtype=torch.float32, device=self._device)  # repeated over tp, cut over tp
        for cut in (False, True):
            mine = [g for g, c in zip(grads, self._tp_cut, strict=True) if g is not None and c == cut and g.numel()]
            if mine:
                squares[int(cut)] = torch.nn.utils.get_total_norm(mine).float().square()
        sum_tensor(squares, self._mesh.fsdp_group, what="gradient norm over data-parallel ranks")
        sum_tensor(squares[1:], self._mesh.tp_group, what="gradient norm over tensor-parallel ranks")
        return squares.sum().sqrt()
