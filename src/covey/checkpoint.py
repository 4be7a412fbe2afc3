"""Checkpoints of a run: `OUTPUT/checkpoints/step-000012/`, complete or absent.

A checkpoint is written beside its place and moved there in one step; the file COMPLETE is written last, so a directory
without it is never loaded. It holds the weights as `transformers` reads them, the optimizer, the random state, and
`state.json` with the step, the data cursor and what else the trainer hands over. One process; not sharded.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

log = logging.getLogger(__name__)
_MARKER = "COMPLETE"


@dataclass
class Loaded:
    """A checkpoint read back: `state` as it was given to `save`, `optimizer` as state_dict."""

    path: Path
    state: dict[str, Any]
    optimizer: dict[str, Any]


def save(
    root: Path,
    step: int,
    *,
    model: Any,
    tokenizer: Any,
    optimizer: dict[str, Any],
    state: dict[str, Any],
    keep_last: int,
) -> Path:
    """Write the checkpoint of `step` under `root`, then remove all but the last `keep_last`.

    `state` must be JSON. Raises OSError when the disk refuses; older checkpoints are then untouched.
    """
    final = root / f"step-{step:06d}"
    temporary = root / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    torch.save({"optimizer": optimizer, "random": torch.get_rng_state()}, temporary / "training.pt")
    (temporary / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    (temporary / _MARKER).touch()
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    for old in complete(root)[:-keep_last]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def complete(root: Path) -> list[Path]:
    """Complete checkpoints under `root`, oldest first."""
    return sorted(path.parent for path in root.glob(f"step-*/{_MARKER}"))


def load_latest(root: Path, model: Any) -> Loaded | None:
    """Load the newest checkpoint that reads back whole into `model`; None when there is none.

    A damaged one is reported and the one before it is taken.
    """
    for path in reversed(complete(root)):
        try:
            return load(path, model)
        except ValueError as error:
            log.warning("%s; trying the checkpoint before it", error)
    return None


def load(path: Path, model: Any) -> Loaded:
    """Load one checkpoint into `model`; ValueError that names it when it is not complete or does not read back."""
    if not (path / _MARKER).exists():
        raise ValueError(
            f"checkpoint {path} is not complete (no file {_MARKER}): it was interrupted while being written"
        )
    try:
        weights: dict[str, torch.Tensor] = {}
        for file in sorted(path.glob("*.safetensors")):
            weights |= load_file(file)
        training = torch.load(path / "training.pt", weights_only=True)
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError, SafetensorError) as error:
        raise ValueError(f"checkpoint {path} is damaged: {type(error).__name__}: {error}") from error
    _load_weights(path, model, weights)
    torch.set_rng_state(training["random"])
    return Loaded(path, state, training["optimizer"])


def _load_weights(path: Path, model: Any, weights: dict[str, torch.Tensor]) -> None:
    own = model.state_dict()
    # A tied tensor is stored once, under one of its names.
    stored = {own[name].data_ptr() for name in weights if name in own}
    missing = [name for name, tensor in own.items() if name not in weights and tensor.data_ptr() not in stored]
    unknown = [name for name in weights if name not in own]
    shapes = [name for name in weights if name in own and own[name].shape != weights[name].shape]
    if missing or unknown or shapes:
        raise ValueError(
            f"checkpoint {path} belongs to another model: missing {missing[:3]}, unknown {unknown[:3]}, "
            f"other shapes {shapes[:3]}"
        )
    model.load_state_dict(weights, strict=False)
