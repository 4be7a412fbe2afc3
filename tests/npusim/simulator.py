"""Build and register the simulated device. A process that has called `register` has torch.npu, hccl and torch_npu.

Nothing is registered in the process that collects the tests: `device: auto` would choose the simulated device there.
The library is compiled once for each version of its source, torch and Python, into `.cache/npusim`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.npusim import torch_npu_twin
from tests.npusim.rules import RULES
from torch.utils.cpp_extension import include_paths

SOURCE = Path(__file__).with_name("npusim.cpp")
CACHE = Path(__file__).parents[2] / ".cache" / "npusim"


def why_not() -> str:
    """Why the device cannot be built here; empty when it can."""
    if shutil.which("g++") is None:
        return "the simulated NPU needs the compiler g++"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the simulated NPU needs Python's headers"
    return ""


def build() -> Path:
    """The compiled library; another process that builds it meanwhile is waited for."""
    version = f"{torch.__version__} {sys.version} {SOURCE.read_text(encoding='utf-8')}"
    directory = CACHE / hashlib.sha256(version.encode()).hexdigest()[:16]
    library = directory / "covey_npusim.so"
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def register() -> Any:
    """Make this process have the device; returns the library with its counters."""
    library = _load(build())
    torch.utils.rename_privateuse1_backend("npu")  # type: ignore[attr-defined]
    library.register_hooks()
    for rule in RULES:
        library.add_rule(rule.op, rule.type_numbers, not rule.allowed, rule.why)
    torch._register_device_module("npu", _NpuModule(library))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)  # type: ignore[attr-defined]

    def hccl(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return library.hccl(dist.ProcessGroupGloo(dist.PrefixStore("hccl", store), rank, size, timeout))  # type: ignore[attr-defined]

    dist.Backend.register_backend("hccl", hccl, devices=["npu"])
    sys.modules["torch_npu"] = torch_npu_twin.module()
    return library


def _compile(library: Path) -> None:
    root = Path(torch.__file__).parent
    includes = [*include_paths(), sysconfig.get_paths()["include"]]
    made = library.with_suffix(".tmp")
    command = ["g++", "-O1", "-std=c++20", "-fPIC", "-shared", "-w", *(f"-I{path}" for path in includes)]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", str(SOURCE), "-o", str(made)]
    command += [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"npusim.cpp does not compile:\n{done.stderr[-4000:]}"
    made.rename(library)


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("covey_npusim", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


class _Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **_options: Any) -> Any:
        chosen = device or torch.device("npu", torch.npu.current_device())  # type: ignore[attr-defined]
        return super().__new__(cls, device=chosen, priority=priority)

    def wait_stream(self, stream: Any) -> None:  # type: ignore[override]
        """Nothing runs later than it was asked to."""


class _Event(torch.Event):
    def __new__(cls, **_options: Any) -> Any:
        return super().__new__(cls, "npu")


class _NpuModule(types.ModuleType):
    """torch.npu, as far as torch's own code and Covey's ask."""

    Stream, Event = _Stream, _Event

    def __init__(self, library: Any) -> None:
        super().__init__("torch.npu")
        self._library = library
        self.matmul = types.SimpleNamespace(allow_hf32=False)
        self.conv = types.SimpleNamespace(allow_hf32=True)

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return self._library.device_count()

    def current_device(self) -> int:
        return self._library.current_device()

    def set_device(self, device: Any) -> None:
        self._library.set_device(device if isinstance(device, int) else torch.device(device).index or 0)

    def get_device_name(self, device: Any = None) -> str:
        del device
        return "simulated NPU"

    def get_device_capability(self, device: Any = None) -> None:
        """As torch_npu: there is none to unpack."""

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        yield
        self.set_device(before)

    def current_stream(self, device: Any = None) -> Any:
        return _Stream(device)

    default_stream = current_stream

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        del stream
        yield

    def synchronize(self, device: Any = None) -> None:
        del device

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def memory_allocated(self, device: Any = None) -> int:
        del device
        return self._library.bytes_now()

    def max_memory_allocated(self, device: Any = None) -> int:
        del device
        return self._library.bytes_peak()

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        del device
        self._library.reset_peak()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        del device
        return (64 << 30) - self._library.bytes_now(), 64 << 30

    def manual_seed(self, seed: int) -> None:
        self._library.default_generator(self.current_device()).manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.device_count()):
            self._library.default_generator(index).manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        del device
        return self._library.default_generator(self.current_device()).get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        del device
        self._library.default_generator(self.current_device()).set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self) -> bool:
        return True
