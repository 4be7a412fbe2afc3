"""Data parallelism with sharded weights: torch's FSDP2 (`fully_shard`), set up so that gradients are sums.

Each decoder layer is one unit that is gathered in `compute_dtype` before it runs and freed after; the root holds the
rest (embedding, last norm, head; tied weights stay tied) and stays gathered until its backward is over. Masters and
reduced gradients are fp32 pieces of every weight. Gathering the next layer and reducing the last one overlap with
compute (FSDP2's own prefetch). Gradients are reduced once a step, or after every micro-batch, which sends more and
keeps no whole gradient. Gradients are summed over ranks, because the token weights of the loss already carry the
denominator of the whole optimizer step.

Left out: CPU offload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from covey.distributed.mesh import Mesh


class Sharding:
    """A module whose weights are pieces. Every method is called on all ranks."""

    def __init__(
        self,
        root: nn.Module,
        layers: Iterable[nn.Module],
        mesh: Mesh,
        *,
        compute_dtype: torch.dtype,
        reshard_after_forward: bool = True,
        reduce_every_micro_batch: bool = False,
        sum_in_place: bool | None = None,
    ) -> None:
        """Shard `root` over the mesh; its weights become fp32 (or frozen) pieces, on the mesh's device.

        reshard_after_forward: free a layer after its forward and gather it again for backward; False keeps it, which
        saves a third of the communication and costs the gathered weights. reduce_every_micro_batch: keep only this
        rank's piece of the gradient between micro-batches; copies (dp_replicate) still add up once. sum_in_place:
        whether the reduction can sum (torch >= 2.8); otherwise it averages and `loss_scale` makes up for it. None: what
        this torch can.
        """
        device_mesh = mesh.device_mesh["dp_replicate", "fsdp"] if mesh.dp_replicate > 1 else mesh.device_mesh["fsdp"]
        precision = MixedPrecisionPolicy(
            param_dtype=None if compute_dtype == torch.float32 else compute_dtype, reduce_dtype=torch.float32
        )
        self._keep = {True: [], False: []}  # modules by whether they are freed after forward
        for layer in layers:
            fully_shard(layer, mesh=device_mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward)
            self._keep[reshard_after_forward].append(layer)
        fully_shard(root, mesh=device_mesh, mp_policy=precision, reshard_after_forward=False)
        self._keep[False].append(root)
        self._root: Any = root
        self._units = [unit for units in self._keep.values() for unit in units]
        self._reduce_every = reduce_every_micro_batch
        if sum_in_place is None:
            sum_in_place = hasattr(root, "set_force_sum_reduction_for_comms")
        # Backward multiplies the loss by this, so that the reduced gradient is the sum over ranks.
        self.loss_scale = 1.0 if sum_in_place else float(mesh.dp * mesh.cp)
        if sum_in_place:
            for unit in self._units:
                unit.set_force_sum_reduction_for_comms(True)
                unit.set_gradient_divide_factor(1.0)

    def sync_gradients(self, last: bool, *, of: Sequence[nn.Module] | None = None, rest: bool = True) -> None:
        """Whether the next backward is the last one before the optimizer, so that ranks must add up.

        Before the last, gradients pile up unsharded and unsent, or with reduce_every_micro_batch in pieces.
        of: only these layers (None: all); rest: and what no layer holds.
        """
        for unit in self._units:
            chosen = rest if unit is self._root else of is None or unit in of
            unit.set_requires_gradient_sync((last or self._reduce_every) and chosen, recurse=False)
            unit.set_requires_all_reduce(last, recurse=False)

    def reshard(self) -> None:
        """Free every gathered weight."""
        for unit in self._units:
            unit.reshard()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All weights whole, in the compute dtype, and no communication in forward: ranks may run apart.

        Memory: the whole model in the compute dtype (divided by the tensor-parallel degree).
        """
        for unit in self._units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        try:
            yield
        finally:
            self.reshard()
            for freed, units in self._keep.items():
                for unit in units:
                    unit.set_reshard_after_forward(freed, recurse=False)


def is_sharded(module: nn.Module) -> bool:
    """Whether `Sharding` was applied to the module."""
    return isinstance(module, FSDPModule)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's piece of a sharded tensor, sharing its memory; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, gathered on every rank; a plain tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
