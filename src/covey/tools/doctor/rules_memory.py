"""Rules about memory: which phase of a step is near the device's limit, what grows, and what to change by how much."""

from __future__ import annotations

import numpy as np

from covey.tools.doctor.evidence import RunView, Seen, first_step
from covey.tools.doctor.host import gigabytes

# The allocator's fragments and communication buffers lie beside what is counted: a tenth, from published runs.
NEAR_LIMIT = 0.9
GROWTH_RATIO, GROWTH_SHARE = 1.1, 0.02  # from the first to the last third, and of the device's memory
ENDED_AT = 0.85


def memory_update(view: RunView) -> Seen | None:
    """The update is near the limit."""
    seen = _near_limit(view, "update")
    return seen and Seen(
        seen.found, seen.severity, seen.step, seen.plots, seen.numbers, _update_fix(view, seen.numbers)
    )


def memory_scoring(view: RunView) -> Seen | None:
    """Log-probabilities of old policy, reference or teacher are near the limit."""
    return _near_limit(view, "scoring")


def memory_rollout(view: RunView) -> Seen | None:
    """The rollout is near the limit."""
    seen = _near_limit(view, "rollout")
    if seen is None:
        return None
    rollout = view.config.rollout
    over = seen.numbers["peak"] - 0.8 * seen.numbers["limit"]
    cache = max(rollout.kv_cache_bytes // 4, rollout.kv_cache_bytes - int(over))
    fix = f"rollout.kv_cache_bytes: {cache} (now {rollout.kv_cache_bytes}; {gigabytes(over)} less brings it to 80 %)"
    fix += (
        f", or rollout.max_num_seqs: {max(1, rollout.max_num_seqs // 2)}, or parallel.tp: {2 * view.config.parallel.tp}"
    )
    return Seen(seen.found, seen.severity, seen.step, seen.plots, seen.numbers, fix)


def memory_growth(view: RunView) -> Seen | None:
    """What is in use at the start of a step grows from step to step."""
    start, limit = view.series("memory/start_bytes"), view.series("memory/limit_bytes")
    values = start.values[len(start) // 10 :]  # the first steps fill caches
    third = max(1, len(values) // 3)
    parts = [float(np.median(values[i * third : (i + 1) * third])) for i in range(3)]
    grown = parts[2] - parts[0]
    steady = parts[2] > parts[1] > parts[0] and parts[2] - parts[1] > 0.3 * grown  # not a cache that is full by now
    if parts[2] < GROWTH_RATIO * parts[0] or grown < GROWTH_SHARE * limit.values.max() or not steady:
        return None
    per_step = grown / (2 * third)
    left = (limit.values.max() - start.values[-1]) / per_step
    text = (
        f"{gigabytes(parts[0])} to {gigabytes(parts[2])}, {per_step / 2**20:.1f} MiB a step; full in {left:.0f} steps"
    )
    return Seen(text, plots=(start.name,), numbers={"bytes_per_step": per_step, "steps_left": left})


def ended_near_limit(view: RunView) -> Seen | None:
    """The run ended without a summary while memory was nearly full."""
    if view.finished or len(view.steps) >= view.config.train.steps:
        return None
    peak, limit = view.series("memory/peak_bytes"), view.series("memory/limit_bytes")
    share = float(peak.values[-3:].max() / limit.values[-1])
    if share < ENDED_AT:
        return None
    phases = {name: view.series(f"memory/{name}_bytes").values[-3:].max() for name in ("rollout", "scoring", "update")}
    worst = max(phases, key=lambda name: phases[name])
    text = f"step {len(view.steps)} of {view.config.train.steps} is the last; {share:.0%} of "
    numbers = {"peak": float(phases[worst]), "limit": float(limit.values[-1]), "start": _start(view), "phase": worst}
    fix = _update_fix(view, numbers) if worst == "update" else ""
    return Seen(
        f"{text}{gigabytes(limit.values[-1])} in use, most in {worst}",
        "failure",
        int(peak.steps[-1]),
        (peak.name,),
        numbers,
        fix,
    )


def _near_limit(view: RunView, phase: str) -> Seen | None:
    peak, limit = view.series(f"memory/{phase}_bytes"), view.series("memory/limit_bytes")
    bound = float(limit.values.max())
    others = max(view.series(f"memory/{name}_bytes").values.max() for name in ("rollout", "scoring", "update"))
    most = float(peak.values.max())
    if most < NEAR_LIMIT * bound or most < others:
        return None
    numbers = {"peak": most, "limit": bound, "start": _start(view)}
    text = f"{gigabytes(most)} of {gigabytes(bound)}; {gigabytes(numbers['start'])} at the start of a step"
    step = first_step(peak, peak.values >= NEAR_LIMIT * bound)
    plots = tuple(f"memory/{name}_bytes" for name in ("rollout", "scoring", "update"))
    return Seen(text, "warning", step, plots, numbers)


def _start(view: RunView) -> float:
    return float(np.median(view.series("memory/start_bytes").values))


def _update_fix(view: RunView, numbers: dict[str, float]) -> str:
    """What to change, worked out from what the update needs over the start of the step."""
    train, own = view.config.train, numbers["peak"] - numbers["start"]
    over = numbers["peak"] - 0.8 * numbers["limit"]
    ways: list[str] = []
    if own > over > 0:
        tokens = int(train.max_tokens_per_micro_batch * (1 - over / own)) // 256 * 256
        ways.append(
            f"train.max_tokens_per_micro_batch: {max(256, tokens)} (now {train.max_tokens_per_micro_batch}): it "
            f"takes {gigabytes(own)} over the start of the step, {gigabytes(over)} less brings it to 80 %"
        )
    if not view.config.model.gradient_checkpointing:
        ways.append("model.gradient_checkpointing: true (a third more compute, activations of one layer at a time)")
    if view.config.algorithm.kl_coef and not view.config.reference.offload and view.config.lora is None:
        ways.append("reference.offload: true (its weights leave the device between uses)")
    ways.append(
        "parallel.dp_shard over more ranks, then parallel.tp or parallel.pp 2 (weights and moments are divided)"
    )
    return "; ".join(ways)
