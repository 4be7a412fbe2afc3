"""MindSpeed-RL keys about the model: which weights, their architecture, the layout over devices, AdamW's moments.

A Megatron-core checkpoint is tied to one layout; Covey reads and writes Hugging Face directories under any layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from covey.config.rules import Conversion, Finding, Rule, number


def checkpoint_kind(path: str | Path) -> str | None:
    """`hf` or `megatron` for a directory of weights, None for anything else."""
    root = Path(path)
    if (root / "config.json").is_file():
        return "hf"
    marks = ("latest_checkpointed_iteration.txt", "iter_*", "mp_rank_*", "release")
    return "megatron" if root.is_dir() and any(any(root.glob(mark)) for mark in marks) else None


def load(value: Any, run: Conversion) -> Finding:
    """Upstream: a Megatron-core checkpoint, split for one layout. Here: a Hugging Face directory."""
    kind = checkpoint_kind(str(value))
    tokenizer = run.get("megatron_training", "tokenizer_name_or_path")
    if "model.path" in run.overridden:
        return Finding("mapped", "model.path is given by --set")
    if kind == "hf":
        run.set("model.path", str(value))
        if tokenizer is not None:
            run.set("model.tokenizer", str(tokenizer))
        return Finding("honoured", "model.path: a Hugging Face directory")
    if kind == "megatron":
        return Finding(
            "not supported",
            f"{value} is a Megatron-core checkpoint, split for one layout of devices. Covey reads Hugging Face "
            f"directories: --set model.path={tokenizer} for the weights it was converted from, or convert it back",
            blocking=True,
        )
    return Finding("mapped", f"model.path = {tokenizer}: a Hugging Face directory serves every layout, no conversion")


def finetune(value: Any, run: Conversion) -> Finding:
    """False asks to resume."""
    if value:
        return Finding("honoured", "training starts from the weights")
    return Finding("mapped", "resuming: covey train FILE --resume")


def tokenizer_path(value: Any, run: Conversion) -> Finding:
    """The Hugging Face directory: tokenizer, and weights unless `load` is one too."""
    run.set("model.path", str(value))
    return Finding("honoured", "model.path; the tokenizer alone when `load` is a Hugging Face directory too")


def read_checkpoint(path: str | None) -> dict[str, Any] | None:
    """config.json of a model directory on this disk; None where there is none."""
    file = Path(path) / "config.json" if path else None
    if file is None or not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else None


def verify(name: str, *, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """Compare with the checkpoint's config.json, which decides."""

    def rule(value: Any, run: Conversion) -> Finding:
        if run.checkpoint is None:
            return Finding("no effect", f"the checkpoint's {name} is used; it is not on this disk to compare")
        found = run.checkpoint.get(name, (run.checkpoint.get("rope_parameters") or {}).get(name))
        if found is None:
            return Finding("verified", f"the checkpoint's config.json has no {name}")
        wanted = convert(value)
        same = wanted == found if isinstance(found, bool) else math.isclose(number(wanted), number(found))
        if same:
            return Finding("verified", f"equals {name} of the checkpoint")
        return Finding("verified", f"the checkpoint has {name} = {found}, which is used", differs=True)

    return rule


def degree(axis: str) -> Rule:
    """How many devices an axis (`tensor`, `pipeline`, `context`, `data`) is split over."""

    def rule(value: Any, run: Conversion) -> Finding:
        size, world = int(number(value)), run.world_size
        if world == 1:
            if size == 1:
                return Finding("honoured", "not split")
            return Finding("mapped", f"one process is started: nothing is split {size} ways; the numbers are the same")
        sizes = {name: _size(name, run) for name in ("tensor", "pipeline", "context")}
        split = math.prod(sizes.values())
        text = " x ".join(f"{name} {sizes[name]}" for name in sizes) + f" = {split}"
        if world % split:
            return Finding(
                "not supported",
                f"{text} does not divide the {world} processes; start a multiple of {split} (torchrun), or change it",
                blocking=True,
            )
        if axis == "data" and split * size != world:
            return Finding(
                "not supported",
                f"{text}, times data {size} = {split * size}, but {world} processes run; start {split * size} of them "
                f"(torchrun --nproc-per-node), or set data_parallel_size to {world // split}",
                blocking=True,
            )
        return _placed(axis, size, run)

    return rule


def _size(axis: str, run: Conversion) -> int:
    return int(number(run.get("megatron_training", f"{axis}_{'model_' * (axis != 'context')}parallel_size") or 1))


def _placed(axis: str, size: int, run: Conversion) -> Finding:
    if axis == "tensor":
        run.set("parallel.tp", size)
        return Finding("honoured", "parallel.tp")
    if axis == "data":
        return Finding("mapped", "the ranks that tensor and context parallelism leave train on different micro-batches")
    if size == 1:
        return Finding("honoured", "not split")
    if axis == "context" and _is_ulysses(run):
        run.set("parallel.cp", size)
        return Finding("honoured", "parallel.cp")
    unit = "sequences are not split" if axis == "context" else "layers are not split by depth"
    return Finding(
        "mapped", f"{unit}; these ranks share the weights' pieces and train on other micro-batches: the same numbers"
    )


def _is_ulysses(run: Conversion) -> bool:
    return str(run.get("megatron_training", "context_parallel_algo")).startswith("ulysses")


def context_algorithm(value: Any, run: Conversion) -> Finding:
    """How attention works over cut sequences."""
    if _size("context", run) == 1 or run.world_size == 1:
        return Finding("no effect", "no context parallelism")
    if _is_ulysses(run):
        return Finding("honoured", "heads are exchanged for tokens around attention")
    return Finding("mapped", "no ring attention: see context_parallel_size; --set parallel.cp=N for Ulysses")


def sequence_parallel(value: Any, run: Conversion) -> Finding:
    """Tokens between layers cut over the tensor-parallel ranks."""
    if run.world_size == 1 or _size("tensor", run) == 1:
        return Finding("no effect", "no tensor parallelism")
    run.set("parallel.sequence_parallel", bool(value))
    return Finding("honoured", "parallel.sequence_parallel")


def beta(index: int) -> Rule:
    """One of AdamW's two decay rates."""

    def rule(value: Any, run: Conversion) -> Finding:
        betas = [number(run.get("megatron_training", f"adam_beta{i}")) for i in (1, 2)]
        betas[index] = number(value)
        run.set("train.betas", betas)
        return Finding("honoured", f"train.betas[{index}]")

    return rule
