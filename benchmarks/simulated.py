"""A training step of one of many ranks without devices: the real code on tensors that have shapes and no numbers.

torch's fake process group answers every exchange at once, FakeTensorMode keeps shapes only, and `Meter` adds up the
storages that are alive, as an allocator without waste would. Numbers that Python reads from tensors do not exist here,
so the norm of the gradient is given and statistics are not summarised.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from covey.config.schema import Config
from covey.distributed import mesh as meshes
from covey.optim import Optimizer
from covey.policy import ForwardLimits, Policy, _StepTensors
from covey.totals import UpdateTotals
from covey.types import Group, Prompt, Response, StepBatch

CPU = torch.device("cpu")


@dataclass
class Simulated:
    """Bytes of one rank."""

    weights: int  # its pieces of all parameters
    moments: int  # AdamW's
    gradients: int  # before the optimizer step
    update_peak: int  # forward and backward of all micro-batches
    optimizer_peak: int
    micro_batches: int
    tokens: int  # of a micro-batch
    targets: int  # response tokens of a micro-batch

    @property
    def peak(self) -> int:
        """The larger one."""
        return max(self.update_peak, self.optimizer_peak)


class Meter(TorchDispatchMode):
    """Bytes of all storages that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it made."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.count(leaf)
        return out

    def count(self, tensor: Tensor) -> None:
        """Count the tensor's storage, once."""
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            reference = weakref.ref(storage, partial(self._forget, key))
            self._sizes[key] = reference, 0
            self._resize(key, storage.nbytes())

    def resized(self, storage: Any) -> None:
        """The storage has another size now."""
        if storage._cdata in self._sizes:
            self._resize(storage._cdata, storage.nbytes())

    def _resize(self, key: int, size: int) -> None:
        reference, before = self._sizes[key]
        self._sizes[key] = reference, size
        self.now += size - before
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, _: Any) -> None:
        self.now -= self._sizes.pop(key)[1]


def simulate(
    config: Config, network: Any, world: int, *, prompt: int, response: int, dtype: torch.dtype, rank: int = 0
) -> Simulated:
    """One optimizer step of a rank on groups of prompts and responses of these lengths.

    network: on the meta device (covey.models.load.load_skeleton).
    """
    with (
        _processes(config, world, rank) as mesh,
        FakeTensorMode(allow_non_fake_inputs=True),
        Meter() as meter,
        _resizes(meter),
    ):
        policy = _policy(config, network, mesh, dtype)
        parameters = [p for p in policy.model.parameters() if p.requires_grad]
        optimizer = Optimizer(parameters, config.train, norm=lambda grads: torch.tensor(1.0))
        weights = sum(_nbytes(p) for p in policy.model.parameters())
        moments = sum(tensor.nbytes for state in optimizer.moments() for tensor in state.values())
        meter.peak = meter.now
        batch = _batch(config, prompt, response)
        micros = policy._pack(batch.groups)
        _update(config, policy, batch, micros)
        update_peak, meter.peak = meter.peak, meter.now
        gradients = sum(_nbytes(p.grad) for p in parameters if p.grad is not None)
        optimizer.step(1e-6)
        shape = len(micros), micros[0].num_tokens, len(micros[0].target_ids)
        return Simulated(weights, moments, gradients, update_peak, meter.peak, *shape)


def _policy(config: Config, network: Any, mesh: meshes.Mesh, dtype: torch.dtype) -> Policy:
    parallel = config.parallel
    network.set_attn_implementation("covey")
    _give_memory(network, torch.float32 if mesh.world > 1 else dtype)
    if config.model.gradient_checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(
        network,
        device=CPU,
        temperature=1.0,
        limits=ForwardLimits(config.train.max_tokens_per_micro_batch, config.train.logits_chunk_bytes),
        mesh=mesh,
        compute_dtype=dtype,
        sequence_parallel=parallel.sequence_parallel,
        pp_chunks=parallel.pp_chunks,
        pp_layers=parallel.pp_layers,
        reduce_every_micro_batch=parallel.reduce_every_micro_batch,
    )
    policy.model.train()
    return policy


def _update(config: Config, policy: Policy, batch: StepBatch, micros: list[Any]) -> None:
    """`Policy.update` without the optimizer and without reading statistics."""
    algorithm = config.algorithm
    step = _StepTensors(batch, CPU)
    loss_of = partial(
        policy._micro_loss,
        step=step,
        weights=policy._response_weights(batch, list(range(len(batch.groups))), algorithm, 1),
        objective=policy.steering.objective(algorithm, None),
        totals=UpdateTotals(),
        first=True,
    )
    policy.parallel.accumulate(micros, loss_of)


def _batch(config: Config, prompt: int, response: int) -> StepBatch:
    num_samples = config.rollout.num_samples
    answer = Response([1] * response, [-1.0] * response)
    groups = [
        Group(Prompt(i, [1] * prompt, ""), [answer] * num_samples)
        for i in range(config.algorithm.mini_batch_size or config.train.batch_size)
    ]
    shape = (len(groups), num_samples)
    return StepBatch(groups, np.zeros(shape), np.zeros(shape))


def _give_memory(network: nn.Module, dtype: torch.dtype) -> None:
    """Fake tensors on the cpu in place of those on meta; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype))
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _nbytes(tensor: Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.nbytes


@contextmanager
def _processes(config: Config, world: int, rank: int) -> Iterator[meshes.Mesh]:
    """One rank of so many that answer at once."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    if world > 1:
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    degrees = {axis: getattr(config.parallel, axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")}
    mesh = meshes.start(communication="fake", device=CPU, **degrees)
    before = {name: DeviceMesh.__dict__[name] for name in ("__init__", "_concatenate") if name in DeviceMesh.__dict__}
    for name, method in before.items():  # a mesh is numbers, which must exist
        function = method.__func__ if isinstance(method, staticmethod) else method
        real = partial(_without_fake, function)
        setattr(DeviceMesh, name, staticmethod(real) if isinstance(method, staticmethod) else _method(real))
    try:
        yield mesh
    finally:
        for name, method in before.items():
            setattr(DeviceMesh, name, method)
        meshes.stop()
        del os.environ["RANK"], os.environ["WORLD_SIZE"]


def _without_fake(function: Any, *args: Any, **kwargs: Any) -> Any:
    with _disable_current_modes():
        return function(*args, **kwargs)


def _method(function: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return method


@contextmanager
def _resizes(meter: Meter) -> Iterator[None]:
    """FSDP2 frees and allocates by resizing storages, which is no operation that a mode sees."""
    resize = torch.UntypedStorage.resize_

    def counted(storage: Any, size: int) -> Any:
        out = resize(storage, size)
        meter.resized(storage)
        return out

    torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
