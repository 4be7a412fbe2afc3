"""The gradient's norm over pieces: every element counts once, whatever axes cut or repeat it.

Sharded weights are cut over the fsdp ranks, those that tensor parallelism cuts also over the tp ranks; a weight that
tp repeats is counted on one of them. Replicas (dp_replicate) hold equal gradients and do not enter. A pipeline's stages
add up; a tied embedding and head, which are on the first and the last stage, are one weight: its gradient is the sum of
both, and counts once.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from covey.distributed.collectives import sum_tensor
from covey.distributed.mesh import Mesh
from covey.distributed.tensor_parallel import TensorParallel


class GradientNorm:
    """Norm of local gradients, the same number on every rank."""

    def __init__(
        self,
        mesh: Mesh,
        names: Sequence[str],
        *,
        device: torch.device,
        tp: TensorParallel | None = None,
        tied: Container[str] = (),
    ) -> None:
        """names: of the parameters, in their order; tp: which of them are cut, and which gradients are shares.

        tied: those that both ends of a pipeline have.
        """
        self._tied = tied
        self._mesh = mesh
        self._names = list(names)
        self._tp = tp
        self._device = device

    def __call__(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Euclidean norm of the whole gradient from this rank's pieces, in the parameters' order.

        Before that, gradients of which several ranks hold a share each are summed over those, in place.
        """
        present = [(name, g) for name, g in zip(self._names, grads, strict=True) if g is not None]
        for name, grad in present:
            if name in self._tied:
                sum_tensor(grad, self._mesh.pp_ends_group, what=f"gradient of {name} over the ends of the pipeline")
        if self._tp is not None:
            self._tp.sum_partial(present)
        if self._mesh.pp_rank > 0:
            present = [(name, grad) for name, grad in present if name not in self._tied]
        tp_cuts = {} if self._tp is None else self._tp.cuts
        squares = torch.zeros(2, dtype=torch.float32, device=self._device)  # repeated over tp, cut over tp
        for cut in (False, True):
            mine = [g for name, g in present if (name in tp_cuts) == cut and g.numel()]
            if mine:
                squares[int(cut)] = torch.nn.utils.get_total_norm(mine).float().square()
        sum_tensor(squares, self._mesh.fsdp_group, what="gradient norm over data-parallel ranks")
        sum_tensor(squares[1:], self._mesh.tp_group, what="gradient norm over tensor-parallel ranks")
        total = squares.sum()
        sum_tensor(total, self._mesh.pp_group, what="gradient norm over the stages of the pipeline")
        return total.sqrt()
