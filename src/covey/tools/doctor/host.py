"""`covey doctor`: is this host fit for training? What a check reads comes through `Host`, so that any host can be
described by a directory of files, a set of variables and the outputs of commands.

A check returns one Finding. One that has nothing to look at on this host is `skipped`: "does not apply". The tables of
devices are in ascend.py, ascend_settings.py and nvidia.py, the checks of every Linux host in system.py.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from covey.findings import Finding, Severity
from covey.rewards.sandbox import find_bwrap

_COMMAND_TIMEOUT_S = 20.0  # a healthy management tool answers in a second or two; a hanging driver never


def examine(host: Host) -> list[Finding]:
    """Every check, in the order in which a fault would hinder a run."""
    from covey.tools.doctor import ascend, ascend_settings, nvidia, system  # they build on Host

    checks = (*system.CHECKS, *ascend.CHECKS, *ascend_settings.CHECKS, *nvidia.CHECKS)
    return [check(host) for check in checks]


def run_command(command: Sequence[str]) -> str | None:
    """What a command prints; None when it is not there, fails, or does not answer in time."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def installed_version(package: str) -> str | None:
    """The version of an installed Python package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def port_is_free(port: int) -> bool:
    """Whether a server could listen on the port now."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def limits_of_process() -> dict[str, int]:
    """The soft limits that matter to a run; -1: unlimited."""
    names = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
    soft = {name: resource.getrlimit(which)[0] for name, which in names.items()}
    return {name: -1 if value == resource.RLIM_INFINITY else value for name, value in soft.items()}


def usable_cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def disk_bytes(path: Path) -> tuple[int, int]:
    """(free, total) of the file system of a path, or of its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    usage = shutil.disk_usage(path)
    return usage.free, usage.total


def product_of_matrices() -> dict[str, Any]:
    """A matrix product on the device that a run would take, compared with float64 on cpu.

    {"kind", "name", "error"}: error is the relative L2 distance; or {"failed": why it could not run}.
    """
    import torch

    from covey.device import resolve

    try:
        device = resolve()
        a = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        on_device = (a.to(device.torch_device, device.dtype) @ a.to(device.torch_device, device.dtype)).cpu().double()
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        return {"failed": str(error).splitlines()[0]}
    exact = a.to(device.dtype).double() @ a.to(device.dtype).double()
    return {
        "kind": device.kind,
        "name": device.name,
        "dtype": str(device.dtype).removeprefix("torch."),
        "error": float((on_device - exact).norm() / exact.norm()),
    }


@dataclass(frozen=True)
class Host:
    """How checks see a machine. The defaults look at this one.

    Example: Host(root=Path("fake"), env={}, command=outputs.get, version={"torch": "2.10.0"}.get)
    """

    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    command: Callable[[Sequence[str]], str | None] = run_command
    version: Callable[[str], str | None] = installed_version
    requirements: Callable[[], Sequence[str]] = lambda: importlib.metadata.requires("covey") or []
    limits: Callable[[], Mapping[str, int]] = limits_of_process
    cores: Callable[[], int] = usable_cores
    disk: Callable[[Path], tuple[int, int]] = disk_bytes
    free_port: Callable[[int], bool] = port_is_free
    sandbox: Callable[[], str | None] = find_bwrap
    product: Callable[[], Mapping[str, Any]] = product_of_matrices
    python: tuple[int, int] = sys.version_info[:2]

    def path(self, name: str) -> Path:
        """A path of the host, `name` without the leading slash."""
        return self.root / name

    def text(self, name: str) -> str | None:
        """A file's text; None when it cannot be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def entries(self, name: str) -> list[str]:
        """Names in a directory; none when it is not there."""
        path = self.path(name)
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []


def judge(
    rule: str,
    good: bool,
    *,
    found: str,
    expected: str,
    why: str,
    fix: str,
    severity: Severity = "failure",
    **evidence: Any,
) -> Finding:
    """`ok` when good, else `severity`."""
    return Finding(rule, "ok" if good else severity, found, expected, why, "" if good else fix, evidence)


def not_applicable(rule: str, reason: str, why: str) -> Finding:
    """A check that has nothing to look at here."""
    return Finding(rule, "skipped", f"does not apply: {reason}", "", why, "")


def numbers(version: str) -> tuple[int, ...]:
    """(2, 10, 0) of `2.10.0.post4`, `2.10.0+cpu`; the numbers before the first part that is none."""
    found = re.match(r"\d+(?:\.\d+)*", version.strip().lstrip("vV"))
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def gigabytes(amount: float) -> str:
    """1.5 GiB."""
    return f"{amount / 2**30:.1f} GiB"
