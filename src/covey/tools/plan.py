"""`covey plan`: which layouts of so many devices fit their memory, how long a step takes, and why others do not.

It reads the configuration and the model's config.json, starts nothing and needs no device. Memory: covey.memory, which
benchmarks/memory_model.py compares with the real code. Time: tools/time_model.py, rough. Assumptions: docs/plan.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from covey.config.schema import Config
from covey.distributed.mesh import Mesh
from covey.distributed.pipeline_order import layers_of_chunks
from covey.memory import memory_per_rank, num_micro_batches, peak_bytes, phase_bytes
from covey.models.architectures import architecture
from covey.models.load import load_skeleton
from covey.parallel import check_heads
from covey.tools.time_model import Hardware, Lengths, concurrent_sequences, step_seconds
from covey.tools.traffic import Shape, Work, rollout_traffic, update_traffic

_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
_SIZE = 2  # bytes of a number in compute: plans are for 16 bits
_COLUMNS = {"weights": ("weights", "fp32 masters"), "optimizer": ("AdamW moments",), "ref": ("reference", "teacher")}


@dataclass(frozen=True)
class Request:
    """What is planned for."""

    devices: int
    memory_bytes: int  # of a device
    hardware: Hardware
    lengths: Lengths
    reserve: float = 0.08  # share of the memory for what is not counted: the allocator's waste, workspaces


def plan(config: Config, request: Request, *, model_path: str | None = None) -> dict[str, Any]:
    """`layouts` that fit, fastest first; `too_large` and `not_allowed` with reasons; `batch`, worked out; `model`.

    model_path: a directory with config.json, in place of model.path. A layout is tried with and without gradient
    checkpointing, reduction after every micro-batch and, with tp, sequence parallelism; the fastest that fits stays.
    """
    path = model_path or config.model.path
    model = load_skeleton(path, trust_remote_code=config.model.trust_remote_code)
    teacher = None
    if config.distillation is not None:
        teacher = load_skeleton(config.distillation.teacher, trust_remote_code=config.model.trust_remote_code)
    shape = Shape.of(model)
    fitting, too_large, refused = [], [], []
    for degrees in _degrees(request.devices):
        if reason := _refusal(config, model, degrees, request):
            refused.append({**degrees, "reason": reason})
            continue
        options = [_evaluate(one, model, teacher, shape, request) for one in _variants(config, degrees)]
        fits = [option for option in options if option["peak_bytes"] <= option["usable_bytes"]]
        if fits:
            fitting.append(min(fits, key=lambda option: (option["seconds"]["all"], option["peak_bytes"])))
        else:
            smallest = min(options, key=lambda option: option["peak_bytes"])
            too_large.append({**smallest, "reason": _too_large(smallest)})
    fitting.sort(key=lambda option: option["seconds"]["all"])
    too_large.sort(key=lambda option: option["peak_bytes"])
    return {
        "model": asdict(shape) | {"path": path, "params": sum(p.numel() for p in model.parameters())},
        "devices": request.devices,
        "memory_bytes": request.memory_bytes,
        "hardware": asdict(request.hardware),
        "batch": _batch(config, request, fitting[0] if fitting else None),
        "layouts": fitting,
        "too_large": too_large,
        "not_allowed": refused,
    }


def print_plan(result: dict[str, Any], *, limit: int = 12) -> None:
    """Tables on standard output."""
    console = Console(width=None if Console().is_terminal else 160)
    hardware = result["hardware"]
    console.print(
        f"{result['model']['path']}: {result['model']['params'] / 1e9:.2f}B parameters on {result['devices']} devices "
        f"of {_gib(result['memory_bytes'])}; {hardware['name']}: {hardware['peak_tflops']:g} TFLOPS, memory "
        f"{hardware['memory_gbs']:g} GB/s, links {hardware['link_gbs']:g} and {hardware['network_gbs']:g} GB/s"
    )
    batch = Table(title="The batch", show_header=False, box=None, title_justify="left")
    for name, text in result["batch"].items():
        batch.add_row(name, str(text))
    console.print(batch)
    console.print(
        _layout_table(result["layouts"][:limit], f"Layouts that fit ({len(result['layouts'])}), fastest first")
    )
    if result["layouts"]:
        console.print(_parts_table(result["layouts"][0]))
    reasons = Table(title="Layouts that do not", box=None, title_justify="left")
    for name in ("layout", "why"):
        reasons.add_column(name)
    for row in result["too_large"]:
        reasons.add_row(_name(row), row["reason"])
    for reason, names in _by_reason(result["not_allowed"]).items():
        reasons.add_row("\n".join(names), reason)
    if reasons.row_count:
        console.print(reasons)


def _by_reason(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Names of the layouts by the first clause of what speaks against them."""
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row["reason"].partition(";")[0], []).append(_name(row))
    return found


def _degrees(devices: int) -> Iterator[dict[str, int]]:
    """All products of five axes that are the number of devices."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for pp, tp, cp, replicate in product(divisors, repeat=4):
        if devices % (pp * tp * cp * replicate) == 0:
            shard = devices // (pp * tp * cp * replicate)
            if replicate == 1 or shard * cp > 1:  # copies of unsharded weights: dp_shard does the same with less memory
                yield dict(zip(_AXES, (replicate, shard, cp, tp, pp), strict=True))


def _refusal(config: Config, model: Any, degrees: dict[str, int], request: Request) -> str:
    """Why the code or sense does not allow the layout; empty when they do."""
    tp, cp, pp = degrees["tp"], degrees["cp"], degrees["pp"]
    depth = model.config.get_text_config().num_hidden_layers
    try:
        if tp * cp > 1:
            check_heads(model, tp, cp)
        if tp * pp > 1:
            architecture(model, f"parallel.tp={tp}, pp={pp}")
        layers_of_chunks(depth, pp, config.parallel.pp_chunks if pp > 1 else 1, None)
    except ValueError as error:
        return str(error)
    if tp * cp > request.hardware.per_host:
        return f"tp {tp} x cp {cp} exchange in every layer and would cross hosts of {request.hardware.per_host} devices"
    if tp > 1 and config.algorithm.sampling_consistent:
        return "algorithm.sampling_consistent needs whole logits (tp 1)"
    groups = config.algorithm.mini_batch_size or config.train.batch_size
    if degrees["dp_replicate"] * degrees["dp_shard"] > groups * config.rollout.num_samples:
        return f"{groups} prompts of an optimizer step leave data-parallel ranks without work"
    return ""


def _variants(config: Config, degrees: dict[str, int]) -> Iterator[Config]:
    sharded = degrees["dp_shard"] * degrees["cp"] * degrees["dp_replicate"] > 1
    for checkpointing in (False, True):
        for every in (False, True) if sharded else (False,):
            for sequence in (False, True) if degrees["tp"] > 1 else (False,):
                parallel = degrees | {"reduce_every_micro_batch": every, "sequence_parallel": sequence}
                if degrees["pp"] == 1:
                    parallel |= {"pp_chunks": 1, "pp_layers": None}
                elif degrees["pp"] != config.parallel.pp:
                    parallel |= {"pp_layers": None}
                yield config.model_copy(
                    update={
                        "model": config.model.model_copy(update={"gradient_checkpointing": checkpointing}),
                        "parallel": config.parallel.model_copy(update=parallel),
                    }
                )


def _evaluate(config: Config, model: Any, teacher: Any, shape: Shape, request: Request) -> dict[str, Any]:
    """Memory by part and phase, seconds by part, bytes sent by axis."""
    parallel, lengths = config.parallel, request.lengths
    mesh = Mesh(**{axis: getattr(parallel, axis) for axis in _AXES})
    memory = memory_per_rank(config, model, mesh, torch.bfloat16, teacher)
    groups = sum(getattr(mesh, axis) > 1 for axis in _AXES) + (mesh.world > 1) + (2 if mesh.pp > 1 else 0)
    memory["communication buffers"] = groups * request.hardware.group_buffer_bytes
    work = _work(config, mesh, lengths)
    seconds = step_seconds(config, shape, mesh, request.hardware, lengths, work, size=_SIZE)
    return {
        **{axis: getattr(parallel, axis) for axis in _AXES},
        "gradient_checkpointing": config.model.gradient_checkpointing,
        "reduce_every_micro_batch": parallel.reduce_every_micro_batch,
        "sequence_parallel": parallel.sequence_parallel,
        "micro_batches": work.micro_batches,
        "decoded_at_once": concurrent_sequences(config, shape, mesh, lengths, _SIZE),
        "memory_bytes": memory,
        "phase_bytes": phase_bytes(memory),
        "peak_bytes": peak_bytes(memory),
        "usable_bytes": int(request.memory_bytes * (1 - request.reserve)),
        "seconds": {**seconds, "all": sum(seconds.values())},
        "sent_bytes": update_traffic(config, shape, mesh, work, size=_SIZE)
        | ({"gather for rollout": rollout_traffic(shape, mesh, size=_SIZE)} if mesh.world > 1 else {}),
    }


def _work(config: Config, mesh: Mesh, lengths: Lengths) -> Work:
    samples = config.rollout.num_samples
    groups = config.algorithm.mini_batch_size or config.train.batch_size
    tokens = groups * (lengths.prompt + samples * (lengths.response - 1))
    micros = num_micro_batches(config, mesh, prompt=lengths.prompt, response=lengths.response)
    return Work(micros, tokens // mesh.dp, groups * samples * lengths.response // mesh.dp)


def _batch(config: Config, request: Request, best: dict[str, Any] | None) -> dict[str, Any]:
    """What a step amounts to, with the numbers written out."""
    train, samples, lengths = config.train, config.rollout.num_samples, request.lengths
    mini = config.algorithm.mini_batch_size or train.batch_size
    group = lengths.prompt + samples * (lengths.response - 1)
    per_step = config.algorithm.epochs * (train.batch_size // mini)
    table: dict[str, Any] = {
        "prompts": f"{train.batch_size} a step, {mini} an optimizer step",
        "responses": f"{train.batch_size} prompts x {samples} = {train.batch_size * samples} a step",
        "assumed lengths": f"prompt {lengths.prompt}, response {lengths.response} tokens",
        "sampled tokens": f"{train.batch_size * samples} x {lengths.response} = "
        f"{train.batch_size * samples * lengths.response:,} a step",
        "trained tokens": f"{train.batch_size} x ({lengths.prompt} + {samples} x {lengths.response - 1}) = "
        f"{train.batch_size * group:,} a step, each prompt once; x {config.algorithm.epochs} epochs",
        "optimizer steps": f"{config.algorithm.epochs} epochs x {train.batch_size // mini} mini-batches = {per_step} "
        f"a step, {train.steps * per_step:,} in {train.steps} steps",
    }
    if best is not None:
        dp = best["dp_replicate"] * best["dp_shard"]
        parts = dp * best["cp"] * best["pp"]
        table["on the first layout"] = (
            f"{mini} prompts over {dp} data-parallel ranks, {best['micro_batches']} micro-batches each of at most "
            f"{train.max_tokens_per_micro_batch:,} tokens; a rollout in {parts} parts of up to "
            f"{-(-train.batch_size // parts)} prompts, {best['decoded_at_once']} responses at once"
        )
    return table


def _too_large(option: dict[str, Any]) -> str:
    phase, needed = max(option["phase_bytes"].items(), key=lambda item: item[1])
    part, size = max(option["memory_bytes"].items(), key=lambda item: item[1])
    settings = _settings(option)
    return (
        f"needs {_gib(needed)} in the {phase} at best ({settings}), {_gib(option['usable_bytes'])} are usable; "
        f"largest part: {part}, {_gib(size)}"
    )


def _layout_table(layouts: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, box=None, title_justify="left")
    names = ("layout", "settings", "peak", *_COLUMNS, "rollout", "gradients", "optim. step", "s a step")
    for name in (*names, "rollout s", "update s", "sent"):
        table.add_column(name)
    for option in layouts:
        memory, seconds, phases = option["memory_bytes"], option["seconds"], option["phase_bytes"]
        table.add_row(
            _name(option),
            _settings(option),
            _gib(option["peak_bytes"]),
            *(_gib(sum(memory.get(part, 0) for part in parts)) for parts in _COLUMNS.values()),
            *(_gib(phases[phase]) for phase in ("rollout", "gradients", "optimizer")),
            f"{seconds['all']:,.0f}",
            f"{seconds['rollout']:,.0f}",
            f"{seconds['update']:,.0f}",
            _gib(sum(option["sent_bytes"].values())),
        )
    return table


def _parts_table(option: dict[str, Any]) -> Table:
    table = Table(title=f"A rank of {_name(option)}", show_header=False, box=None, title_justify="left")
    for part, size in option["memory_bytes"].items():
        table.add_row(part, _gib(size))
    return table


def _settings(option: dict[str, Any]) -> str:
    words = {
        "gradient_checkpointing": "checkpointing",
        "reduce_every_micro_batch": "reduce every micro-batch",
        "sequence_parallel": "sequence parallel",
    }
    return ", ".join(word for key, word in words.items() if option[key]) or "plain"


def _name(option: dict[str, Any]) -> str:
    return " ".join(f"{axis} {option[axis]}" for axis in _AXES if option[axis] > 1) or "one device"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size else "-"
