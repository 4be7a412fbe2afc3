"""`covey export`: a checkpoint of any layout to a Hugging Face directory that transformers and vLLM load.

A checkpoint of a run with LoRA holds the adapter alone. It is merged into the model that it was trained on, or written
by itself as peft and vLLM read it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from covey.checkpoint import complete, read_weights
from covey.models.adapters import (
    base_of_adapter,
    is_adapter_directory,
    is_adapter_weight,
    merged_weights,
    restore_adapter,
    save_adapter,
)
from covey.models.load import export_model, load_model
from covey.tokenizer import read_tokenizer


def run(
    source: Path, out: Path, *, dtype: str = "auto", adapter: bool = False, base: str | None = None
) -> dict[str, Any]:
    """Export a checkpoint, or the newest one of a run, to `out`; one process with memory for the whole model.

    dtype: of the written weights; auto: what the model's config says. adapter: write the adapter of a run with LoRA
    instead of merging it into its model. base: where that model is now. ValueError when there is no checkpoint, it is
    damaged, or `out` exists.
    """
    disable_progress_bar()
    checkpoint = _checkpoint(source)
    if out.exists():
        raise ValueError(f"--out {out} already exists; choose another directory")
    described = checkpoint / "hf"
    has_adapter = is_adapter_directory(str(described / "adapter"))
    for option, given in (("--adapter", adapter), ("--base", base is not None)):
        if given and not has_adapter:
            raise ValueError(f"{option}: {checkpoint} has no adapter, its run trained all weights; leave {option} out")
    config = AutoConfig.from_pretrained(described)
    written: Any = (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)
    out.parent.mkdir(parents=True, exist_ok=True)
    found = {"checkpoint": str(checkpoint), "dtype": str(written).removeprefix("torch.")}
    if adapter:
        return found | {"adapter": str(_write_adapter(checkpoint, out, written))}
    if has_adapter:
        model = _with_adapter(checkpoint, base)
        merged = merged_weights(model, ((name, p.detach()) for name, p in model.named_parameters()))
        weights = {name: tensor.to(written) for name, tensor in merged}
    else:
        model, weights = AutoModelForCausalLM.from_config(config, dtype=torch.float32), None
        read_weights(checkpoint, model)
        model = model.to(written)
    if (described / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(described)
    has_tokenizer = (described / "tokenizer_config.json").exists()
    tokenizer = read_tokenizer(described) if has_tokenizer else None
    export_model(model, tokenizer, out, weights=weights, dtype=None if weights is None else written)
    return found | {"model": str(out)}


def _write_adapter(checkpoint: Path, out: Path, dtype: torch.dtype) -> Path:
    with torch.device("meta"):  # its weights are not needed
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint / "hf"))
    restore_adapter(model, checkpoint / "hf" / "adapter")
    read_weights(checkpoint, model)
    save_adapter(model, {n: p.to(dtype) for n, p in model.named_parameters() if is_adapter_weight(n)}, out)
    return out


def _with_adapter(checkpoint: Path, base: str | None) -> Any:
    """The model that the adapter was trained on, in fp32, with the adapter beside its weights."""
    described = checkpoint / "hf" / "adapter"
    try:
        model = load_model(base or base_of_adapter(described), dtype=torch.float32, device=torch.device("cpu"))
    except ValueError as error:
        raise ValueError(f"the adapter's model: {error}; --base DIR says where that model is now") from error
    restore_adapter(model, described)
    read_weights(checkpoint, model)
    return model


def _checkpoint(source: Path) -> Path:
    """`source` itself, or the newest complete checkpoint of the run there."""
    if (source / "state.json").exists():
        return source
    found = complete(source / "checkpoints") or complete(source)
    if not found:
        raise ValueError(f"{source}: neither a checkpoint nor a run with a complete one")
    return found[-1]
