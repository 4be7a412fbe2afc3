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
        return Finding("mapped", "the ranks that the other axes leave train on different micro-batches")
    if size == 1:
        return Finding("honoured", "not split")
    if axis == "pipeline":
        return _pipeline(size, run)
    if axis == "context" and _is_ulysses(run):
        run.set("parallel.cp", size)
        return Finding("honoured", "parallel.cp")
    return Finding(
        "mapped",
        "sequences are not split; these ranks share the weights' pieces and train on other micro-batches: the same "
        "numbers",
    )


def _pipeline(size: int, run: Conversion) -> Finding:
    """Stages, pieces of layers on each (virtual stages), and layers of each piece.

    `num_layer_list` names the layers of each stage; `num_layers_per_virtual_pipeline_stage` cuts the stages' layers
    into pieces; `noop_layers` numbers layers, counted by `num_layers`, that upstream puts in to make the pieces even.
    """
    keys = ("num_layers", "num_layer_list", "num_layers_per_virtual_pipeline_stage", "noop_layers")
    num_layers, listed, per_piece, noops = (run.get("megatron_training", key) for key in keys)
    num_layers = num_layers or (run.checkpoint or {}).get("num_hidden_layers")
    run.set("parallel.pp", size)
    if listed:
        layers = _integers(listed)
        if len(layers) != size or per_piece or noops:
            return Finding(
                "not supported",
                f"num_layer_list gives {len(layers)} numbers for {size} stages, and goes without virtual stages and "
                "noop_layers; for pieces of other sizes --set parallel.pp_chunks and parallel.pp_layers",
                blocking=True,
            )
        run.set("parallel.pp_layers", layers)
        return Finding("honoured", "parallel.pp, parallel.pp_layers")
    if not (per_piece or noops):
        return Finding("honoured", "parallel.pp")
    if num_layers is None:
        return Finding(
            "not supported",
            "num_layers is not given and the checkpoint is not on this disk, so virtual stages and noop_layers cannot "
            "be placed: give num_layers, or --set parallel.pp_chunks and parallel.pp_layers",
            blocking=True,
        )
    total = int(number(num_layers))
    in_piece = int(number(per_piece)) if per_piece else max(1, total // size)
    if total % (size * in_piece):
        return Finding(
            "not supported",
            f"num_layers {total} is not a multiple of pipeline {size} x {in_piece} layers of a virtual stage; "
            "change one of them",
            blocking=True,
        )
    pieces = total // in_piece
    run.set("parallel.pp_chunks", pieces // size)
    if not noops:
        return Finding("honoured", "parallel.pp, parallel.pp_chunks")
    placed = [index // in_piece for index in _integers(noops)]
    run.set("parallel.pp_layers", [in_piece - placed.count(piece) for piece in range(pieces)])
    return Finding("honoured", "parallel.pp, parallel.pp_chunks; parallel.pp_layers leaves the empty layers out")


def _integers(value: Any) -> list[int]:
    """`"7,7,8"`, `[7, 7, 8]` or `7`."""
    parts = value if isinstance(value, list) else str(value).split(",")
    return [int(number(part)) for part in parts]


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
