"""What a rank needs of its device's memory, from the configuration and the model's shapes.

A step has three phases that do not happen at once: rollout, gradients, optimizer. `peak_bytes` is the largest of them
and of what is always there. The phase of the gradients has its own moments: the backward of the head, that of a
layer, and the reduction of what belongs to no layer; the largest one counts. Formulas: docs/plan.md;
benchmarks/memory_model.py compares them with the real code on tensors without numbers. Under a pipeline it is the rank
that needs the most.

Not counted: the allocator's waste, workspaces of kernels, buffers of the communication library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from covey.config.schema import Config
from covey.distributed.mesh import Mesh
from covey.distributed.pipeline_order import layers_of_chunks
from covey.models.architectures import layers_of
from covey.models.stages import stage_parameters

_PREFILL_TOKENS = 8192  # prompt tokens that a rollout runs at once (rollout/native.py)
_ROLLOUT = ("gathered for rollout", "KV cache (at most)", "rollout's logits and hidden states")
_UPDATE = ("gathered layers", "gradients not reduced yet", "activations", "work of backward")
_OPTIMIZER = ("gradients",)


def memory_per_rank(config: Config, model: Any, mesh: Mesh, dtype: torch.dtype, teacher: Any = None) -> dict[str, int]:
    """Bytes on the device of one rank; `dtype`: of weights and compute on the device; offloaded weights left out.

    Of the ranks of a pipeline, the one with the highest peak. Under a pipeline `model` needs a row in ARCHITECTURES.
    """
    depth = len(layers_of(model))
    chunks = layers_of_chunks(depth, mesh.pp, config.parallel.pp_chunks, config.parallel.pp_layers)
    stages = stage_parameters(model, chunks, mesh.pp)
    found = []
    for rank, (held, trained) in enumerate(stages):
        num_layers = sum(map(len, chunks[rank :: mesh.pp]))
        stage = Stage(rank, held, trained, num_layers, first=rank == 0, last=rank == mesh.pp - 1)
        found.append(_memory(config, model, mesh, dtype, teacher, stage))
    return max(found, key=peak_bytes)


def peak_bytes(memory: dict[str, int]) -> int:
    """The largest phase, and what is always there."""
    phases = [sum(memory.get(name, 0) for name in names) for names in (_ROLLOUT, _UPDATE, _OPTIMIZER)]
    return sum(memory.values()) - sum(phases) + max(phases)


def phase_bytes(memory: dict[str, int]) -> dict[str, int]:
    """Bytes in each phase, with what is always there."""
    phases = {"rollout": _ROLLOUT, "gradients": _UPDATE, "optimizer": _OPTIMIZER}
    sums = {phase: sum(memory.get(name, 0) for name in names) for phase, names in phases.items()}
    always = sum(memory.values()) - sum(sums.values())
    return {phase: always + size for phase, size in sums.items()}


@dataclass(frozen=True)
class Stage:
    """What one pipeline rank holds; without a pipeline, everything."""

    rank: int
    held: int  # parameters, before tensor and data parallelism cut them
    trained: int
    num_layers: int
    first: bool  # has the embedding
    last: bool  # has norm and head


def _memory(config: Config, model: Any, mesh: Mesh, dtype: torch.dtype, teacher: Any, stage: Stage) -> dict[str, int]:
    size, total = dtype.itemsize, sum(p.numel() for p in model.parameters())
    ranks, sharded = mesh.dp_shard * mesh.cp * mesh.tp, mesh.world > 1
    held, trained = stage.held, stage.trained
    reference, distillation = config.reference, config.distillation
    averaged = 4 if reference.decay and size < 4 else 0  # an fp32 average beside 16-bit weights
    own_weights = config.lora is None or config.model.ref_path is not None  # else the policy's, without the adapter
    has_reference = config.algorithm.kl_coef and own_weights and not reference.offload
    has_teacher = teacher is not None and distillation is not None and not distillation.offload
    copies = 0 if sharded or dtype == torch.float32 else 4 * trained  # fp32 masters beside 16-bit weights
    text = model.config.get_text_config()
    hidden_states = _PREFILL_TOKENS * size * (3 * text.intermediate_size // mesh.tp + 6 * text.hidden_size)
    memory = {
        # Trained pieces are fp32 masters themselves.
        "weights": (4 * trained + size * (held - trained)) // ranks if sharded else size * total,
        "fp32 masters": copies,
        "AdamW moments": 8 * trained // ranks,
        "reference": (size + averaged) * held // ranks if has_reference else 0,
        "teacher": size * sum(p.numel() for p in teacher.parameters()) // ranks if teacher and has_teacher else 0,
        # A rollout runs on whole weights, cut by tensor parallelism only; a step gathers less.
        "gathered for rollout": size * total // mesh.tp if sharded else 0,
        "KV cache (at most)": config.rollout.kv_cache_bytes,
        # logits, their fp32 copy, probabilities, the sorted ones
        "rollout's logits and hidden states": config.rollout.max_num_seqs * text.vocab_size * (size + 12)
        + hidden_states,
        # Copied to fp32 for the optimizer step.
        "gradients": (4 * trained // ranks if sharded else size * trained) + copies,
    }
    memory |= _update(config, model, mesh, size, stage)
    return {name: amount for name, amount in memory.items() if amount}


def _update(config: Config, model: Any, mesh: Mesh, size: int, stage: Stage) -> dict[str, int]:
    """The phase of the gradients at its worst moment, by part."""
    text, tp, sharded = model.config.get_text_config(), mesh.tp, mesh.world > 1
    table = text.vocab_size * text.hidden_size // tp
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    tables = table * (1 if tied and (stage.first or stage.last) else int(stage.first) + int(stage.last))
    layer = max(0, stage.held // tp - tables) // max(1, stage.num_layers)
    full = stage.trained == stage.held  # not an adapter
    trained_share = stage.trained / stage.held
    several = num_micro_batches(config, mesh) > 1
    piles = several and sharded and not config.parallel.reduce_every_micro_batch
    pieces = 4 * stage.trained // (mesh.dp_shard * mesh.cp * tp)
    unreduced = 4 * stage.trained // tp if piles else 0
    if not sharded:  # gradients pile up in place, in the numbers of the weights
        unreduced = size * stage.trained
    kept_pieces = pieces if several and not piles and sharded else 0
    tokens = micro_batch_tokens(config)
    kept = activation_bytes(config, model, tp, size) * stage.num_layers // text.num_hidden_layers
    kept = kept * _under_way(config, mesh, stage) // mesh.cp
    norm = tokens * 8 * text.hidden_size // mesh.cp if stage.last else 0
    gathered = size * (tables + 2 * layer) if sharded else 0
    chunk = min(config.train.logits_chunk_bytes, 4 * tokens * text.vocab_size // tp)
    blocks = 3 if tp > 1 else 2 if config.algorithm.entropy_coef else 1  # of fp32 logits at once
    head = _head_work(chunk, blocks, table, size, full=full, in_place=not sharded and size == 4) if stage.last else 0
    layer_work = _layer_work(config, model, tp, size) // mesh.cp
    table_gradient = size * table if stage.last and full else 0  # the head's, until the end of backward
    # The last layer's gradient is on its way in fp32, this one's largest matrix has its own.
    matrix = size * text.hidden_size * text.intermediate_size // tp
    reducing = int((4 * layer + matrix) * trained_share) if sharded else 0
    # (gathered, unreduced, activations, work) of the three moments
    moments = [
        (gathered - size * layer if sharded else 0, unreduced + kept_pieces, kept + norm, head),
        (gathered, unreduced + kept_pieces, kept, layer_work + table_gradient + reducing),
    ]
    if sharded and full:  # layers are reduced; the tables are copied into the buffer that is sent
        moments.append((0, pieces, 0, (4 if piles else size) * tables + 4 * tables))
    names = ("gathered layers", "gradients not reduced yet", "activations", "work of backward")
    return dict(zip(names, max(moments, key=sum), strict=True))


def activation_bytes(config: Config, model: Any, tp: int, size: int) -> int:
    """What all layers keep of one micro-batch for backward; only each layer's input with gradient checkpointing."""
    tokens = micro_batch_tokens(config)
    layers = model.config.get_text_config().num_hidden_layers
    if not config.model.gradient_checkpointing:
        return tokens * layers * _layer_token_bytes(config, model, tp, size)
    cut = tp if config.parallel.sequence_parallel else 1
    return tokens * layers * size * model.config.get_text_config().hidden_size // cut


def num_micro_batches(config: Config, mesh: Mesh, *, prompt: int | None = None, response: int | None = None) -> int:
    """Micro-batches of a data-parallel rank for an optimizer step, when all prompts and responses have these tokens.

    Default: the longest that are allowed.
    """
    samples, budget = config.rollout.num_samples, config.train.max_tokens_per_micro_batch
    groups = config.algorithm.mini_batch_size or config.train.batch_size
    prompt = prompt or config.data.max_prompt_length
    later = (response or config.rollout.max_response_length) - 1  # the last token of a response is not run
    fitting = min(samples, max(1, (budget - prompt) // max(1, later)))  # responses of a row
    rows, row = groups * -(-samples // fitting), prompt + fitting * later
    return max(1, -(-rows // (mesh.dp * max(1, budget // row))))


def micro_batch_tokens(config: Config) -> int:
    """Packed tokens of the largest micro-batch that can come: one response may exceed the budget."""
    longest = config.data.max_prompt_length + config.rollout.max_response_length - 1
    return max(config.train.max_tokens_per_micro_batch, longest)


def head_dim(text: Any) -> int:
    """Width of an attention head of a text configuration."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _layer_token_bytes(config: Config, model: Any, tp: int, size: int) -> int:
    """What a layer keeps of a token: inputs of matrices, of norms in fp32, of attention and activation."""
    text = model.config.get_text_config()
    width, hidden, dim = text.hidden_size, text.intermediate_size, head_dim(text)
    heads, kv_heads = text.num_attention_heads, text.num_key_value_heads
    upcast = 4 + size if size < 4 else 4  # x in fp32 and x normalised
    # Sequence parallelism cuts what norms keep; their output is gathered before the matrices.
    norms = 2 * width * (upcast // tp + size if config.parallel.sequence_parallel and tp > 1 else upcast + size)
    attention = size * dim * (2 * heads + 2 * kv_heads) + 4 * heads
    if hasattr(layers_of(model)[0].self_attn, "q_norm"):
        attention += (upcast + size) * dim * (heads + kv_heads)
    if config.parallel.cp > 1:  # the exchanged copies: keys of all heads, and the output before it goes back
        attention += size * dim * heads + (2 * size * dim * (heads - kv_heads) if kv_heads % config.parallel.cp else 0)
    return norms + (attention + 4 * size * hidden) // tp


def _layer_work(config: Config, model: Any, tp: int, size: int) -> int:
    """Of a micro-batch in the backward of one layer: gradients, and with checkpointing what is computed again."""
    text = model.config.get_text_config()
    tokens = micro_batch_tokens(config)
    gradients = size * (2 * text.intermediate_size // tp + 2 * text.hidden_size)
    again = _layer_token_bytes(config, model, tp, size) if config.model.gradient_checkpointing else 0
    return tokens * (gradients + again)


def _head_work(chunk: int, blocks: int, table: int, size: int, *, full: bool, in_place: bool) -> int:
    """The head at its worst: logits and probabilities forward, or its gradient in fp32 and what a chunk adds to it."""
    rounded = chunk * size // 4 if size < 4 else 0  # a chunk of logits in the numbers of the weights
    gradient = (4 + size) * table if full and not in_place else 0
    return rounded + max(2 * chunk, blocks * chunk + gradient)


def _under_way(config: Config, mesh: Mesh, stage: Stage) -> float:
    """Of how many micro-batches a stage keeps activations at once, in passes of all its layers."""
    if mesh.pp == 1:
        return 1
    chunks, later = config.parallel.pp_chunks, mesh.pp - stage.rank - 1
    passes = later + 1 if chunks == 1 else 2 * later + (chunks - 1) * mesh.pp + 1
    return min(passes / chunks, num_micro_batches(config, mesh))
