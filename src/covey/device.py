"""The only table of devices: what each is called, which numbers and back ends it uses, how its memory is read.

`resolve` is called once per process; everything else takes the `Device` it returns. Nothing below mentions a device by
name. Not run on NPU or CUDA: those rows follow the documentation of torch and torch_npu.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
from contextlib import suppress
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
        """Whether equal inputs give equal bits: on cpu, elsewhere after `make_deterministic`.

        Without it some kernels add in an order that varies (index_add).
        """
        return self.kind == "cpu" or torch.are_deterministic_algorithms_enabled()

    def synchronize(self) -> None:
        """Wait until queued work is done; nothing to wait for on cpu."""
        if self.kind != "cpu":
            _module(self.kind).synchronize()

    def release_memory(self) -> None:
        """Give freed blocks back, so that others can use them; on cpu they are back already."""
        if self.kind != "cpu":
            _module(self.kind).empty_cache()

    def peak_memory_bytes(self) -> int:
        """Largest memory since `reset_peak_memory`: allocated on the device; on cpu the process's resident set."""
        if self.kind != "cpu":
            return int(_module(self.kind).max_memory_allocated())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def reset_peak_memory(self) -> None:
        """Let `peak_memory_bytes` start again from what is in use now; without effect on a cpu that is not Linux's."""
        if self.kind != "cpu":
            _module(self.kind).reset_peak_memory_stats()
            return
        with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # proc(5): resets the high-water mark of the resident set, and nothing else

    def memory_bytes(self) -> tuple[int, int]:
        """(free, total) memory of the device now; on cpu of the host or of this process's control group."""
        if self.kind != "cpu":
            free, total = _module(self.kind).mem_get_info()
            return int(free), int(total)
        return _host_memory_bytes()

    def reduced_precision(self) -> list[str]:
        """What lets fp32 products run in fewer bits: switches and variables that are on. `resolve` sets all off."""
        on = [] if torch.get_float32_matmul_precision() == "highest" else ["torch float32 matmul precision"]
        if self.kind == "npu":
            on += [f"torch.npu.{name}.allow_hf32" for name in _HF32 if getattr(torch.npu, name).allow_hf32]  # type: ignore[attr-defined]
        if self.kind == "cuda":
            on += [name for name in _TF32_VARIABLES if os.environ.get(name, "0") == "1"]
        return on

    def describe(self) -> dict[str, str]:
        """What was chosen, for the start-up table and the run's records."""
        return {
            "device": f"{self.torch_device} ({self.name})",
            "dtype": str(self.dtype).removeprefix("torch."),
            "fp32 products": ", ".join(self.reduced_precision()) or "in fp32",
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
    _whole_precision(kind)
    default_dtype, communication = _TABLE[kind]
    chosen = default_dtype if dtype == "auto" else getattr(torch, dtype)
    if kind == "cpu":
        return Device(kind, torch.device("cpu"), _cpu_name(), chosen, communication)
    module = _module(kind)
    module.set_device(local_rank)
    name = module.get_device_name(local_rank)
    return Device(kind, torch.device(kind, local_rank), name, chosen, communication)


def make_deterministic() -> None:
    """Refuse kernels whose result varies from run to run. Counts from the first kernel of the process on an NPU.

    The variables that collectives and matrix products need beside it are config/environment.py's.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs a pass over every new tensor


# kind: default dtype, torch.distributed back end (objects always travel over gloo)
_TABLE = {
    "npu": (torch.bfloat16, "cpu:gloo,npu:hccl"),
    "cuda": (torch.bfloat16, "cpu:gloo,cuda:nccl"),
    "cpu": (torch.float32, "gloo"),
}


# What makes fp32 matrix products run in TF32 or HF32 (10 bits of mantissa). fp32 is asked for where it matters
# (log-probabilities, losses, whole runs that are compared), so it is never shortened; 16-bit numbers are not affected.
_HF32 = ("matmul", "conv")
_TF32_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


def _whole_precision(kind: str) -> None:
    torch.set_float32_matmul_precision("highest")
    if kind == "npu":
        for name in _HF32:
            getattr(torch.npu, name).allow_hf32 = False  # type: ignore[attr-defined]


def _host_memory_bytes() -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    with suppress(OSError, StopIteration, ValueError):  # better where Linux tells: caches can be given back
        with open("/proc/meminfo") as file:
            free = 1024 * int(next(line for line in file if line.startswith("MemAvailable")).split()[1])
        with open("/sys/fs/cgroup/memory.max") as most, open("/sys/fs/cgroup/memory.current") as current:
            limit = int(most.read())  # "max" is no number: no limit
            free, total = min(free, max(0, limit - int(current.read()))), min(total, limit)
    return free, total


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
