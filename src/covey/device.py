"""The only table of devices: what each is called, which numbers and back ends it uses, how its memory is read.

`resolve` is called once per process; everything else takes the `Device` it returns. Nothing below mentions a device by
name. Not run on NPU or CUDA: those rows follow the documentation of torch and torch_npu.
"""

from __future__ import annotations

import importlib.util
import resource
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Device:
    """A resolved device of this process."""

    kind: str  # cpu | cuda | npu
    torch_device: torch.device
    name: str  # what the hardware calls itself
    dtype: torch.dtype  # default numbers of weights and compute
    communication: str  # back end of torch.distributed

    @property
    def deterministic(self) -> bool:
        """Whether equal inputs give equal bits; elsewhere kernels add in an order that varies (index_add)."""
        return self.kind == "cpu"

    def synchronize(self) -> None:
        """Wait until queued work is done; nothing to wait for on cpu."""
        if self.kind != "cpu":
            _module(self.kind).synchronize()

    def release_memory(self) -> None:
        """Give freed blocks back, so that others can use them; on cpu they are back already."""
        if self.kind != "cpu":
            _module(self.kind).empty_cache()

    def peak_memory_bytes(self) -> int:
        """Largest memory so far: allocated on the device; on cpu the process's resident set."""
        if self.kind != "cpu":
            return int(_module(self.kind).max_memory_allocated())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def describe(self) -> dict[str, str]:
        """What was chosen, for the start-up table and the run's records."""
        return {
            "device": f"{self.torch_device} ({self.name})",
            "dtype": str(self.dtype).removeprefix("torch."),
            "communication": self.communication,
            "torch": torch.__version__,
            "threads": str(torch.get_num_threads()),
        }


def resolve(kind: str = "auto", dtype: str = "auto", local_rank: int = 0) -> Device:
    """The device named `kind`, or the best there is; ValueError when it is not there."""
    if kind == "auto":
        kind = next((k for k in ("npu", "cuda") if _available(k)), "cpu")
    if kind not in _TABLE:
        raise ValueError(f"device: {kind!r} is unknown; known are auto, {', '.join(_TABLE)}")
    if kind != "cpu" and not _available(kind):
        raise ValueError(f"device: {kind} was asked for, but {_why_not(kind)}; set device: auto or cpu")
    default_dtype, communication = _TABLE[kind]
    chosen = default_dtype if dtype == "auto" else getattr(torch, dtype)
    if kind == "cpu":
        return Device(kind, torch.device("cpu"), _cpu_name(), chosen, communication)
    module = _module(kind)
    module.set_device(local_rank)
    name = module.get_device_name(local_rank)
    return Device(kind, torch.device(kind, local_rank), name, chosen, communication)


# kind: default dtype, torch.distributed back end (objects always travel over gloo)
_TABLE = {
    "npu": (torch.bfloat16, "cpu:gloo,npu:hccl"),
    "cuda": (torch.bfloat16, "cpu:gloo,cuda:nccl"),
    "cpu": (torch.float32, "gloo"),
}


def _module(kind: str) -> Any:
    return getattr(torch, kind)


def _available(kind: str) -> bool:
    if kind == "npu":
        if importlib.util.find_spec("torch_npu") is None:
            return False
        try:
            import torch_npu  # noqa: F401  # pyright: ignore[reportMissingImports]
        except (ImportError, RuntimeError, OSError):
            return False
    return bool(_module(kind).is_available())


def _why_not(kind: str) -> str:
    if kind == "npu":
        if importlib.util.find_spec("torch_npu") is None:
            return "torch_npu is not installed (pip install 'covey[npu]' on a host with CANN)"
        return "torch_npu found no NPU (driver, CANN environment, ASCEND_RT_VISIBLE_DEVICES)"
    return f"torch {torch.__version__} found no usable GPU (driver, CUDA build of torch, CUDA_VISIBLE_DEVICES)"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), "cpu")
    except OSError:
        return "cpu"
