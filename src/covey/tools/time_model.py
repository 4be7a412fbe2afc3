"""How long a step takes on a given device: arithmetic, memory traffic and communication at a share of the peak.

Rough by nature: peaks are the makers' or given, the shares are assumptions, everything is a formula of docs/plan.md.
Use it to compare layouts; measure one step before believing seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from covey.config.schema import Config
from covey.distributed.mesh import Mesh
from covey.tools.traffic import Shape, Work, rollout_traffic, update_traffic


@dataclass(frozen=True)
class Hardware:
    """A device and its links; peaks, of which the step reaches the shares below."""

    name: str
    peak_tflops: float  # 16-bit matrix products
    memory_gbs: float  # device memory, GB/s
    link_gbs: float  # between devices of a host, GB/s a device and direction
    network_gbs: float  # between hosts, GB/s a device
    per_host: int = 8
    group_buffer_bytes: int = 0  # device memory of one group of processes in the communication library
    compute_share: float = 0.4  # of peak_tflops, in forward and backward
    decode_share: float = 0.5  # of memory_gbs, in decoding
    launch_s: float = 2e-4  # of Python and kernel launches for a decoder layer and a decoded token
    latency_s: float = 2e-5  # of a collective


# Published peaks, dense 16-bit; none of them measured here.
HARDWARE = {
    "910b": Hardware("910b", 313, 1600, 30, 25, group_buffer_bytes=400 * 2**20),
    "a100": Hardware("a100", 312, 2039, 300, 25, group_buffer_bytes=64 * 2**20),
    "h100": Hardware("h100", 989, 3350, 450, 50, group_buffer_bytes=64 * 2**20),
    "h200": Hardware("h200", 989, 4800, 450, 50, group_buffer_bytes=64 * 2**20),
}


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a prompt and of a response, which a plan must assume."""

    prompt: int
    response: int


def step_seconds(
    config: Config,
    shape: Shape,
    mesh: Mesh,
    hardware: Hardware,
    lengths: Lengths,
    work: Work,
    *,
    size: int,
) -> dict[str, float]:
    """Seconds of a step by part; work: of a data-parallel rank in one optimizer step; size: bytes of a number."""
    algorithm, rollout = config.algorithm, config.rollout
    mini = algorithm.mini_batch_size or config.train.batch_size
    optimizer_steps = algorithm.epochs * (config.train.batch_size // mini)
    forward = forward_flops(shape, lengths, rollout.num_samples) * config.train.batch_size
    rate = hardware.peak_tflops * 1e12 * hardware.compute_share * mesh.world
    scored = int(optimizer_steps > 1 or algorithm.kl_in_reward) + int(algorithm.kl_coef > 0)
    scored += int(config.distillation is not None)
    passes = 4 if config.model.gradient_checkpointing else 3
    bubble = 1.0 + (mesh.pp - 1) / (work.micro_batches * config.parallel.pp_chunks)
    fill = _filled(config, mesh, mini)
    update = algorithm.epochs * passes * forward / rate * bubble / fill
    traffic = update_traffic(config, shape, mesh, work, size=size)
    hidden, open_ = _communication(traffic, mesh, hardware)
    return {
        "rollout": _rollout(config, shape, mesh, hardware, lengths, size),
        "old, reference and teacher logprobs": scored * forward / rate * bubble / fill,
        # gathering and reducing weights overlaps with compute; what is exchanged inside a layer does not
        "update": max(update, optimizer_steps * hidden) + optimizer_steps * open_,
    }


def forward_flops(shape: Shape, lengths: Lengths, num_samples: int) -> float:
    """Of one group: a prompt once and its responses; 2 a parameter and token, 4 a head channel and pair of tokens."""
    prompt, response = lengths.prompt, lengths.response
    tokens = prompt + num_samples * (response - 1)
    pairs = prompt**2 / 2 + num_samples * (response * prompt + response**2 / 2)
    layers = shape.layers * (2 * shape.layer_params * tokens + 4 * shape.heads * shape.head_dim * pairs)
    return layers + 2 * shape.table_params * num_samples * response


def concurrent_sequences(config: Config, shape: Shape, mesh: Mesh, lengths: Lengths, size: int) -> int:
    """Responses that a rank decodes at once: bounded by max_num_seqs, by the cache and by what there is."""
    samples = config.rollout.num_samples
    groups = -(-config.train.batch_size // mesh.num_data)
    token = 2 * shape.layers * max(1, shape.kv_heads // mesh.tp) * shape.head_dim * size
    of_group = (lengths.prompt + samples * config.rollout.max_response_length) * token
    fitting = config.rollout.kv_cache_bytes * samples / of_group
    return max(1, min(config.rollout.max_num_seqs, groups * samples, int(fitting)))


def _rollout(config: Config, shape: Shape, mesh: Mesh, hardware: Hardware, lengths: Lengths, size: int) -> float:
    samples = config.rollout.num_samples
    groups = -(-config.train.batch_size // mesh.num_data)
    rows = concurrent_sequences(config, shape, mesh, lengths, size)
    rounds = groups * samples / rows
    rate = hardware.peak_tflops * 1e12 * hardware.compute_share
    params = (shape.layers * shape.layer_params + shape.table_params) / mesh.tp
    prefill = groups * lengths.prompt * 2 * params / rate
    token = 2 * shape.layers * max(1, shape.kv_heads // mesh.tp) * shape.head_dim * size
    cache = rows * token * (lengths.prompt / samples + lengths.response / 2)  # a prompt's cache is read once a group
    read = (size * params + cache) / (hardware.memory_gbs * 1e9 * hardware.decode_share)
    arithmetic = rows * 2 * params / rate
    sums = 0.0
    if mesh.tp > 1:
        link = _link(mesh.tp, hardware)
        each = hardware.latency_s + 2 * (mesh.tp - 1) / mesh.tp * rows * shape.width * size / link
        sums = 2 * shape.layers * each
    decode = max(read, arithmetic) + sums + shape.layers * hardware.launch_s
    gather = rollout_traffic(shape, mesh, size=size) / _link(mesh.world, hardware)
    return gather + prefill + rounds * lengths.response * decode


def _communication(traffic: dict[str, float], mesh: Mesh, hardware: Hardware) -> tuple[float, float]:
    """Seconds that overlap with compute, and seconds that do not."""
    shards = mesh.tp * mesh.cp * mesh.dp_shard  # consecutive ranks
    hidden = (traffic.get("gather weights", 0.0) + traffic.get("reduce gradients", 0.0)) / _link(shards, hardware)
    open_ = traffic.get("sum replicas", 0.0) / _link(shards * mesh.dp_replicate, hardware)
    open_ += traffic.get("tensor parallel", 0.0) / _link(mesh.tp, hardware)
    open_ += traffic.get("context parallel", 0.0) / _link(mesh.tp * mesh.cp, hardware)
    open_ += traffic.get("pipeline", 0.0) / _link(mesh.world, hardware)
    return hidden, open_


def _link(span: int, hardware: Hardware) -> float:
    """Bytes a second between ranks that lie within `span` consecutive ones."""
    return 1e9 * (hardware.link_gbs if span <= hardware.per_host else hardware.network_gbs)


def _filled(config: Config, mesh: Mesh, mini: int) -> float:
    """Share of the data-parallel ranks that have something to do: there are only so many responses."""
    del config
    return min(1.0, mini / mesh.dp) if mini < mesh.dp else mini / mesh.dp / -(-mini // mesh.dp)
