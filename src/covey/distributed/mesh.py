"""Where this process stands: ranks and groups of pipeline, data, context and tensor parallelism.

Ranks are numbered `(((stage * dp_replicate + replicate) * dp_shard + shard) * cp + context) * tp + tensor`:
tensor-parallel ranks are neighbours, because they exchange the most, and stages are far apart, because they exchange
the least. What the axes mean:

- pp: some layers each; the ranks of one pipeline run the same micro-batches, one after the other;
- dp_replicate, dp_shard: different micro-batches; weights and optimizer are cut over dp_shard (and cp) and repeated
  over dp_replicate;
- cp: one micro-batch's tokens are cut over these ranks;
- tp: one layer's matrices are cut over these ranks.

A process without torchrun is a mesh of one, on which every collective of this package does nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from covey.distributed.agreement import make_store, start_checking, stop_checking

ProcessGroup = Any  # torch.distributed.ProcessGroup; None: a group of one


@dataclass(frozen=True)
class Mesh:
    """Degrees, this process's place, and its groups.

    Example: world 8 as dp_shard 2, cp 2, tp 2; rank 5 has dp_rank 1, cp_rank 0, tp_rank 1, data_rank 2.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    rank: int = 0
    world_group: ProcessGroup = None
    step_group: ProcessGroup = None  # the ranks whose micro-batches make the step: dp x pp, same cp and tp rank
    cp_group: ProcessGroup = None
    tp_group: ProcessGroup = None
    fsdp_group: ProcessGroup = None  # the ranks that hold the pieces of one copy of a stage: dp_shard x cp
    pp_group: ProcessGroup = None  # one pipeline
    pp_falling_group: ProcessGroup = None  # the same ranks again, for sends from a later stage to an earlier one
    pp_ends_group: ProcessGroup = None  # the first and the last stage of a pipeline; None between them
    device_mesh: Any = None  # DeviceMesh (pp, dp_replicate, fsdp, tp)

    @property
    def world(self) -> int:
        """Processes."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Ranks with different micro-batches."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_rank(self) -> int:
        """Which micro-batches this rank runs."""
        return self.rank // (self.cp * self.tp) % self.dp

    @property
    def pp_rank(self) -> int:
        """Which layers it holds."""
        return self.rank // (self.dp * self.cp * self.tp)

    @property
    def cp_rank(self) -> int:
        """Which part of a micro-batch's tokens it holds."""
        return self.rank // self.tp % self.cp

    @property
    def tp_rank(self) -> int:
        """Which part of every matrix it holds."""
        return self.rank % self.tp

    @property
    def data_rank(self) -> int:
        """Which slice of the prompts this rank samples; the ranks of a tensor-parallel group share one."""
        return self.rank // self.tp

    @property
    def num_data(self) -> int:
        """Slices that the prompts are cut into: pp x dp x cp."""
        return self.pp * self.dp * self.cp

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def describe(self) -> dict[str, str]:
        """The layout for the start-up table."""
        if self.world == 1:
            return {"processes": "1"}
        axes = {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}
        axes |= {"cp": self.cp, "tp": self.tp}
        product = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
        parts = self.dp_shard * self.cp * self.tp
        held = f"1/{parts}" if self.pp == 1 else f"1/{parts} of its stage" if parts > 1 else "its stage"
        return {
            "processes": f"{product} = {self.world}",
            "weights": f"each rank holds {held}; {self.dp_replicate} copies",
            "rollout": f"the prompts in {self.num_data} parts"
            + (f", each on {self.tp} tensor-parallel ranks" if self.tp > 1 else ""),
        }


def local_rank() -> int:
    """Which device of this host the process uses; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """Processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this process will be rank 0; known before the processes have joined."""
    return os.environ.get("RANK", "0") == "0"


def resolve_degrees(
    world: int,
    *,
    dp_replicate: int = 1,
    dp_shard: int | Literal["auto"] = "auto",
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
) -> tuple[int, int, int, int, int]:
    """(dp_replicate, dp_shard, cp, tp, pp) whose product is `world`; ValueError with the numbers when none is."""
    given = dp_replicate * cp * tp * pp
    text = f"parallel.dp_replicate {dp_replicate} x cp {cp} x tp {tp} x pp {pp}"
    if dp_shard == "auto":
        if world % given:
            raise ValueError(
                f"{text} = {given} does not divide the {world} processes, so dp_shard: auto has no value; "
                f"start a multiple of {given} processes (torchrun --nproc-per-node), or lower a degree"
            )
        return dp_replicate, world // given, cp, tp, pp
    if given * dp_shard != world:
        raise ValueError(
            f"{text} x dp_shard {dp_shard} = {given * dp_shard}, but {world} processes run; "
            f"start {given * dp_shard} of them (torchrun --nproc-per-node), or set dp_shard: auto"
        )
    return dp_replicate, dp_shard, cp, tp, pp


def start(
    *,
    communication: str,
    device: torch.device,
    dp_replicate: int = 1,
    dp_shard: int | Literal["auto"] = "auto",
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
    timeout_s: float = 1800.0,
    debug: bool = False,
) -> Mesh:
    """Join the processes that torchrun started and build the groups; a mesh of one without torchrun.

    communication: back ends of torch.distributed, as in `device.Device.communication`. timeout_s: how long a collective
    waits for the slowest rank before the run is ended. debug: compare every exchange before it begins (agreement.py).
    """
    world = world_size()
    degrees = resolve_degrees(world, dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp, pp=pp)
    if world == 1:
        return Mesh()
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s)
        if debug:
            store, rank, _ = make_store(timeout_s)
            dist.init_process_group(communication, timeout=timeout, store=store, rank=rank, world_size=world)
            start_checking(store, rank=rank, timeout_s=timeout_s)
        else:
            dist.init_process_group(communication, timeout=timeout)
    replicate, shard, cp, tp, pp = degrees
    # The same ranks under two sets of axes: weights do not care whether dp or cp cut them.
    axes = ("pp", "dp_replicate", "fsdp", "tp")
    weights = init_device_mesh(device.type, (pp, replicate, shard * cp, tp), mesh_dim_names=axes)
    batch = init_device_mesh(device.type, (pp, replicate * shard, cp, tp), mesh_dim_names=("pp", "dp", "cp", "tp"))

    def group(mesh: Any, axis: str) -> ProcessGroup:
        return mesh.get_group(axis) if mesh[axis].size() > 1 else None

    return Mesh(
        *degrees,
        rank=dist.get_rank(),
        world_group=dist.group.WORLD,
        cp_group=group(batch, "cp"),
        tp_group=group(weights, "tp"),
        fsdp_group=group(weights, "fsdp"),
        pp_group=group(weights, "pp"),
        device_mesh=weights,
        **(_pipeline_groups(pp, replicate * shard, cp * tp) if pp > 1 else {"step_group": group(batch, "dp")}),
    )


def _pipeline_groups(pp: int, dp: int, inner: int) -> dict[str, ProcessGroup]:
    """The groups that only a pipeline needs; ranks are numbered (stage, dp, inner)."""
    ranks = torch.arange(pp * dp * inner).view(pp, dp, inner)
    pipelines = ranks.flatten(1).t()
    return {
        "step_group": _my_group(ranks.flatten(0, 1).t().tolist()),
        "pp_falling_group": _my_group(pipelines.tolist()),
        "pp_ends_group": _my_group(pipelines[:, [0, -1]].tolist()),
    }


def _my_group(members: list[list[int]]) -> ProcessGroup:
    """The one of these groups that this process belongs to, or None; every process makes all of them."""
    groups = [(ranks, dist.new_group(ranks)) for ranks in members]
    return next((group for ranks, group in groups if dist.get_rank() in ranks), None)


def stop() -> None:
    """Leave the processes' group; nothing to do for a mesh of one."""
    stop_checking()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
