"""Is there room for the run: disk for checkpoints and records, memory for the step? Estimates, from sizes alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from covey.checks.material import Material
from covey.findings import Finding
from covey.memory import memory_per_rank, peak_bytes

_TOKEN_BYTES = 28  # of a response token in the records: id, log-probabilities of rollout, old and reference, kept set
_ROW_BYTES = 4000  # texts and row of a response
_SURE = ("weights", "fp32 masters", "gradients", "AdamW moments", "reference")  # no estimate


def check_disk(material: Material) -> Finding:
    """Free space under output_dir against what the run keeps there."""
    config = material.config
    where = Path(config.output_dir).absolute()
    free = shutil.disk_usage(next(p for p in (where, *where.parents) if p.exists())).free
    needed = disk_bytes(material)
    one = needed["one checkpoint"]
    total = sum(size for name, size in needed.items() if name != "one checkpoint")
    found = f"{_amount(free)} free at {where}; " + ", ".join(f"{name} {_amount(size)}" for name, size in needed.items())
    expected, why = f"{_amount(total)}", "a full disk stops the run where its checkpoint should have been written"
    fix = (
        "choose an output_dir on a larger disk, or lower checkpoint.keep_last and keep_every, or logging.records: false"
    )
    evidence = {"free": free, "needed": total} | needed
    if free < one + needed["model"]:
        return Finding("disk", "failure", found, expected, why, fix, evidence)
    if free < total:
        return Finding("disk", "warning", found, expected, why, fix, evidence)
    return Finding("disk", "ok", found, expected, why, "", evidence)


def disk_bytes(material: Material) -> dict[str, int]:
    """What the run writes: one checkpoint, all that are kept at one time, records of all steps, the exported model."""
    config = material.config
    whole = sum(p.numel() for p in material.model.parameters())
    trained = sum(p.numel() for p in material.trained_model.parameters() if p.requires_grad)
    one = 12 * trained  # fp32 numbers and AdamW's two moments
    checkpoint, steps = config.checkpoint, config.train.steps
    written = steps // checkpoint.every + 1 if checkpoint.every else 1
    kept = checkpoint.keep_last + (steps // checkpoint.keep_every if checkpoint.keep_every else 0)
    kept += 1 + (checkpoint.best is not None)  # a new one is written before an old one goes
    responses = config.train.batch_size * config.rollout.num_samples
    of_response = _ROW_BYTES + _TOKEN_BYTES * config.rollout.max_response_length
    itemsize = 4 if material.device is None else material.device.dtype.itemsize
    return {
        "one checkpoint": one,
        "checkpoints": one * min(written, kept),
        "records": steps * responses * of_response if config.logging.records else 0,
        "model": itemsize * whole if checkpoint.export else 0,
    }


def check_memory(material: Material) -> Finding:
    """The estimate of a rank's memory against the device's."""
    assert material.device is not None and material.mesh is not None
    model, mesh, dtype = material.trained_model, material.mesh, material.device.dtype
    memory = memory_per_rank(material.config, model, mesh, dtype, material.teacher)
    # On cpu the processes of a host share its memory.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if material.device.kind == "cpu" else 1
    peak, sure = ranks * peak_bytes(memory), ranks * sum(memory.get(name, 0) for name in _SURE)
    free, total = material.device.memory_bytes()
    room = total if material.network is not None else free  # in a run the weights are in place already
    found = f"about {_amount(peak)} at the peak, {_amount(sure)} of it for certain; "
    found += f"{_amount(free)} of {_amount(total)} free"
    expected, why = "a peak within the device's memory", "the run ends out of memory, perhaps only at the longest step"
    fix = "lower train.max_tokens_per_micro_batch or rollout.kv_cache_bytes, set model.gradient_checkpointing, or use "
    fix += "more ranks (parallel.dp_shard, parallel.tp); `covey train FILE --dry-run` shows the parts"
    evidence = {"peak": peak, "sure": sure, "free": free, "total": total, **memory}
    if sure > room:
        return Finding("memory", "failure", found, expected, why, fix, evidence)
    if peak > room:
        return Finding("memory", "warning", found, expected, why, fix, evidence)
    return Finding("memory", "ok", found, expected, why, "", evidence)


def _amount(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"
