"""`covey align capture CONFIG --out DIR`: one optimizer step on a fixed set, with everything on the way written down.

The step is the real one: the configuration's model, kernels and layout, `Learner.learn`, the optimizer. Watching it
changes no number: hooks copy, and stand outside of the model's arithmetic. `--path padded|sequence` computes the
log-probabilities by transformers' eager attention instead, everything else the same (paths.py).

The set is one optimizer step, whatever algorithm.epochs and mini_batch_size say, so that there is one ladder.
Left out: activations under tensor or context parallelism (a rank has parts of them), pipelines.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.config.schema import Config
from covey.models.load import head_weight
from covey.setup import Parts, load_run_parts
from covey.tools.align.bundle import Bundle, set_part, write_bundle
from covey.tools.align.facts import facts_of, settings_of
from covey.tools.align.fixed_set import FixedSet, Source, load_set
from covey.tools.align.hooks import EMBEDDING, FINAL_NORM, LOGITS, ROPE
from covey.tools.align.paths import PATHS
from covey.tools.align.rows import Layout
from covey.tools.align.watch import Found, Watched, fingerprints, watch, weights_after

Around = Callable[[Parts], AbstractContextManager[None]]


def capture(
    config: Config,
    out: Path,
    *,
    source: Source,
    path: str = "packed",
    budget_bytes: int = 256 << 20,
    around: Around = lambda parts: nullcontext(),
) -> dict[str, Any]:
    """Write the bundle `out` and return what it holds. Called on all ranks; rank 0 writes.

    around: what the step runs inside, given the loaded parts; planted faults use it.
    """
    config = _for_capture(config, path)
    parts = load_run_parts(config)
    if path != "packed" and parts.mesh.world > 1:
        raise ValueError(f"--path {path}: transformers' own attention runs on one process; start it without torchrun")
    fixed = load_set(source, config, parts)
    layout = Layout(fixed.groups)
    weights = fingerprints(parts)
    head = _head(parts)  # before the update
    with around(parts):
        watched = watch(config, parts, fixed, layout, path=path, budget_bytes=budget_bytes)
    after = weights_after(parts, watched)
    found = watched.collect(parts)
    if not parts.mesh.is_main:
        return {}
    bundle = _describe(parts, config, fixed, path, watched)
    _add_steps(bundle, layout, watched, found, head)
    _add_weights(bundle, watched, weights, after)
    size = write_bundle(out, bundle, budget_bytes=budget_bytes)
    return {
        "bundle": str(out),
        "bytes": size,
        "set": fixed.origin,
        "prompts": len(fixed.groups),
        "response_tokens": len(layout.targets),
        "rows": len(watched.rows),
        "of_rows": len(layout),
        "steps": len(found.steps),
        "details": watched.plan.details,
        "loss": watched.stats["actor/loss"],
        "grad_norm": watched.stats.get("actor/grad_norm"),
    }


def _for_capture(config: Config, path: str) -> Config:
    if path not in PATHS:
        raise ValueError(f"--path {path}: known are {', '.join(PATHS)}")
    if config.parallel.pp > 1:
        raise ValueError("parallel.pp: a capture has no pipelines; --set parallel.pp=1 computes the same numbers")
    changes: dict[str, Any] = {"algorithm": config.algorithm.model_copy(update={"epochs": 1, "mini_batch_size": None})}
    if path != "packed":
        changes["model"] = config.model.model_copy(update={"kernels": "reference", "gradient_checkpointing": False})
    return config.model_copy(update=changes)


def _head(parts: Parts) -> Tensor:
    """The output head's weight (V, D) in the numbers of the forward, a copy on the host."""
    model = parts.policy.model
    weight = head_weight(model)
    name = next(name for name, p in model.named_parameters() if p is weight)
    whole = parts.policy.parallel.whole(name, weight.detach())
    return whole.to("cpu", parts.policy.parallel.compute_dtype, copy=True)


def _describe(parts: Parts, config: Config, fixed: FixedSet, path: str, watched: Watched) -> Bundle:
    """The bundle with the set, the facts and the numbers of the step."""
    meta, tensors = set_part(fixed.groups, fixed.scores)
    meta |= {
        "origin": fixed.origin,
        "facts": facts_of(parts, config, path=path),
        "settings": settings_of(config),
        "stats": watched.stats,
        "details": watched.plan.details,
    }
    tensors["advantages"] = torch.from_numpy(watched.advantages.copy())
    return Bundle(meta, tensors)


def _add_steps(bundle: Bundle, layout: Layout, watched: Watched, found: Found, head: Tensor) -> None:
    """Activations, logits, per-token numbers, and which rows they are."""
    tensors, steps = bundle.tensors, []
    hidden = None
    for i, ((rung, name), record) in enumerate(found.steps.items()):
        if name == "hidden of logits":
            hidden = record.values
            continue
        key = f"{i:04d}"
        steps.append({"rung": rung, "name": name, "key": key})
        tensors[f"values/{key}"] = record.values
        if len(record.norms):
            tensors[f"norms/{key}"] = record.norms
    if hidden is not None and (LOGITS, LOGITS) not in found.steps:
        steps.append({"rung": LOGITS, "name": LOGITS, "key": LOGITS})
        tensors[f"values/{LOGITS}"] = hidden @ head.t()
    order = {EMBEDDING: 0, ROPE: 1, FINAL_NORM: 3, LOGITS: 4}  # layers between, in the order of running
    steps.sort(key=lambda step: order.get(step["rung"], 2))
    bundle.meta["steps"] = steps
    tensors |= {name: values for name, values in found.tokens.items()}
    tensors["rows"], tensors["logit_rows"] = torch.from_numpy(watched.rows), torch.from_numpy(watched.logit_rows)
    tensors["targets"] = torch.from_numpy(layout.targets)
    for name in ("group", "sample", "position"):
        tensors[f"row_{name}"] = torch.tensor(getattr(layout, name), dtype=torch.int32)


def _add_weights(
    bundle: Bundle, watched: Watched, weights: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> None:
    """Fingerprints before and after the update, norms and rows of gradients and updates."""
    parameters: dict[str, dict[str, Any]] = {}
    for name, values in weights.items():
        parameters[name] = {key: value for key, value in values.items() if key != "vector"}
        if "vector" in values:
            bundle.tensors[f"weight/{name}"] = values["vector"]
        if name in after:
            moved = after[name]
            parameters[name] |= {
                "grad_norm": watched.gradient_norms[name],
                "after": {"norm": moved["norm"], "sha256": moved["sha256"]},
            }
            bundle.tensors[f"gradient/{name}"] = watched.gradients[name]
            bundle.tensors[f"update/{name}"] = moved["update"]
            bundle.tensors[f"gradient_rows/{name}"] = watched.gradient_rows[name]
    bundle.meta["parameters"] = parameters
