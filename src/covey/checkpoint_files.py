"""The directories of checkpoints: which are complete, what is wrong with one, which stay.

A checkpoint `step-000012/` is complete when it has the file COMPLETE and every file has the size that stands there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MARKER = "COMPLETE"


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay: the last ones, every so many steps (0: none), and the best by a metric (higher)."""

    last: int = 2
    every: int = 0
    best: str | None = None  # looked up in state["metrics"]


class DamagedError(ValueError):
    """A checkpoint that cannot be read."""


def complete(root: Path) -> list[Path]:
    """Complete checkpoints under `root`, oldest first."""
    return sorted(path.parent for path in root.glob(f"step-*/{MARKER}"))


def superfluous(root: Path, keep: Keep) -> list[Path]:
    """Complete checkpoints that `keep` does not name."""
    found = complete(root)
    kept = set(found[-keep.last :])
    if keep.every:
        kept |= {path for path in found if int(path.name.removeprefix("step-")) % keep.every == 0}
    if keep.best is not None:
        states = [(json.loads((path / "state.json").read_text(encoding="utf-8")), path) for path in found]
        measured = [(s["metrics"][keep.best], path) for s, path in states if keep.best in s.get("metrics", {})]
        if measured:
            kept.add(max(measured)[1])
    return [path for path in found if path not in kept]


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    marker = path / MARKER
    if not marker.exists():
        return f"checkpoint {path} is not complete (no file {MARKER}): it was interrupted while being written"
    try:
        expected = json.loads(marker.read_text(encoding="utf-8"))
    except ValueError:
        return f"checkpoint {path} is damaged: {MARKER} does not read back"
    actual = sizes(path)
    for name, size in expected.items():
        if actual.get(name) != size:
            found = f"has {actual[name]} bytes" if name in actual else "is missing"
            return f"checkpoint {path} is damaged: {name} {found}, was written with {size}"
    return None


def sizes(directory: Path) -> dict[str, int]:
    """Bytes of every file under a checkpoint by its name, the marker left out."""
    files: Iterable[Path] = (p for p in directory.rglob("*") if p.is_file() and p.name != MARKER)
    return {str(p.relative_to(directory)): p.stat().st_size for p in sorted(files)}
