"""`covey export`: a checkpoint of any layout to a Hugging Face directory that transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from covey.checkpoint import complete, read_weights
from covey.models.load import export_model


def run(source: Path, out: Path, *, dtype: str = "auto") -> dict[str, Any]:
    """Export a checkpoint, or the newest one of a run, to `out`; one process with memory for the whole model.

    dtype: of the written weights; auto: what the model's config says. ValueError when there is no checkpoint, it is
    damaged, or `out` exists.
    """
    checkpoint = _checkpoint(source)
    if out.exists():
        raise ValueError(f"--out {out} already exists; choose another directory")
    described = checkpoint / "hf"
    config = AutoConfig.from_pretrained(described)
    written = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    read_weights(checkpoint, model)
    if (described / "generation_config.json").exists():
        model.generation_config = type(model.generation_config).from_pretrained(described)
    has_tokenizer = (described / "tokenizer_config.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(described) if has_tokenizer else None
    out.parent.mkdir(parents=True, exist_ok=True)
    export_model(model.to(written), tokenizer, out)
    return {"checkpoint": str(checkpoint), "model": str(out), "dtype": str(written).removeprefix("torch.")}


def _checkpoint(source: Path) -> Path:
    """`source` itself, or the newest complete checkpoint of the run there."""
    if (source / "state.json").exists():
        return source
    found = complete(source / "checkpoints") or complete(source)
    if not found:
        raise ValueError(f"{source}: neither a checkpoint nor a run with a complete one")
    return found[-1]
