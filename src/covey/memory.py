"""What a rank needs of its device's memory, from the configuration and the model's shapes.

It counts what is sure (weights, gradients, optimizer, logits, KV cache) and roughly the activations; buffers of
communication and the allocator's waste come on top. Under a pipeline it is the rank with the most parameters.
"""

from __future__ import annotations

from typing import Any

import torch

from covey.config.schema import Config
from covey.distributed.mesh import Mesh
from covey.distributed.pipeline_order import layers_of_chunks
from covey.models.architectures import layers_of
from covey.models.stages import stage_parameters


def memory_per_rank(config: Config, model: Any, mesh: Mesh, dtype: torch.dtype, teacher: Any = None) -> dict[str, int]:
    """Bytes on the device of one rank; `dtype`: of weights and compute on the device; offloaded weights left out."""
    size = dtype.itemsize
    total = sum(p.numel() for p in model.parameters())
    ranks = mesh.dp_shard * mesh.cp * mesh.tp
    chunks = layers_of_chunks(len(layers_of(model)), mesh.pp, config.parallel.pp_chunks, config.parallel.pp_layers)
    held, trained = max(stage_parameters(model, chunks, mesh.pp))  # trained: less with an adapter
    reference, distillation = config.reference, config.distillation
    averaged = 4 if reference.decay and size < 4 else 0  # an fp32 average beside 16-bit weights
    own_weights = config.lora is None or config.model.ref_path is not None  # else the policy's, without the adapter
    has_reference = config.algorithm.kl_coef and own_weights and not reference.offload
    has_teacher = teacher is not None and distillation is not None and not distillation.offload
    sharded = mesh.world > 1
    copies = 0 if sharded or dtype == torch.float32 else 4 * trained  # fp32 masters beside 16-bit weights
    memory = {
        # Trained pieces are fp32 masters themselves.
        "weights": (4 * trained + size * (held - trained)) // ranks if sharded else size * total,
        "fp32 masters": copies,
        # Copied to fp32 for the optimizer step.
        "gradients": (4 * trained // ranks if sharded else size * trained) + copies,
        "AdamW moments": 8 * trained // ranks,
        # A rollout runs on whole weights, cut by tensor parallelism only; a step gathers less.
        "gathered for rollout": size * total // mesh.tp if sharded else 0,
        "reference": (size + averaged) * held // ranks if has_reference else 0,
        "teacher": size * sum(p.numel() for p in teacher.parameters()) // ranks if has_teacher else 0,
        "logits chunk, its gradient": 2 * config.train.logits_chunk_bytes,
        "activations (rough)": int(activation_bytes(config, model, mesh.tp, size) * _kept_share(config, mesh)),
        "KV cache (at most)": config.rollout.kv_cache_bytes,
    }
    return {name: amount for name, amount in memory.items() if amount}


_ROLLOUT = ("gathered for rollout", "KV cache (at most)")
_UPDATE = ("gradients", "logits chunk, its gradient", "activations (rough)")


def peak_bytes(memory: dict[str, int]) -> int:
    """The larger of rollout and update, which do not happen at once, and what both need."""
    rollout, update = (sum(memory.get(name, 0) for name in names) for names in (_ROLLOUT, _UPDATE))
    return sum(memory.values()) - min(rollout, update)


def activation_bytes(config: Config, model: Any, tp: int, size: int) -> int:
    """What the layers keep for backward for one micro-batch: inputs of every matrix and norm, fp32 not counted."""
    text = model.config.get_text_config()
    width, hidden = text.hidden_size, text.intermediate_size
    heads = (2 * text.num_attention_heads + 2 * text.num_key_value_heads) * head_dim(text)
    per_layer = 4 * width + (heads + 4 * hidden) // tp
    layers = text.num_hidden_layers
    kept = layers * width + per_layer if config.model.gradient_checkpointing else layers * per_layer
    return size * config.train.max_tokens_per_micro_batch * kept


def _kept_share(config: Config, mesh: Mesh) -> float:
    """Of one micro-batch's activations, what a rank keeps: the first stage has its layers' of several micro-batches."""
    chunks = config.parallel.pp_chunks
    under_way = mesh.pp if chunks == 1 else 2 * (mesh.pp - 1) + (chunks - 1) * mesh.pp + 1
    return under_way / (mesh.pp * chunks * mesh.cp)


def head_dim(text: Any) -> int:
    """Width of an attention head of a text configuration."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
