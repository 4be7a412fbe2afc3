"""Hosts made of files, variables and outputs of commands, for the tests of the host's checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from covey.findings import Finding
from covey.tools.doctor.host import Host

GIB = 2**30


def host(
    root: Path,
    *,
    files: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    outputs: Mapping[tuple[str, ...], str] | None = None,
    versions: Mapping[str, str] | None = None,
    **more: Any,
) -> Host:
    """A host whose files lie under `root`; whatever is not given is absent."""
    for name, text in (files or {}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    given = dict(outputs or {})

    def command(words: Sequence[str]) -> str | None:
        return given.get(tuple(words))

    defaults: dict[str, Any] = {
        "requirements": lambda: [],
        "limits": lambda: {"nofile": 65536, "nproc": -1, "memlock": -1},
        "cores": lambda: 16,
        "disk": lambda path: (100 * GIB, 200 * GIB),
        "free_port": lambda port: True,
        "sandbox": lambda: "/usr/bin/bwrap",
        "product": lambda: {"kind": "cpu", "name": "Xeon", "dtype": "float32", "error": 1e-7},
        "python": (3, 11),
    }
    return Host(root, env or {}, command, dict(versions or {}).get, **(defaults | more))


def severity(check: Callable[[Host], Finding], of: Host) -> str:
    """The outcome of a check."""
    return check(of).severity
