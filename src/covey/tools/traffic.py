"""How many bytes a rank sends in an optimizer step, by axis of the layout. docs/parallel.md has the table.

Counted as ring algorithms send them: gathering or reduce-scattering a tensor of s bytes over n ranks s (n - 1) / n,
an all-reduce twice that, an exchange all-to-all s (n - 1) / n, a message s. benchmarks/communication.py counts the
calls of real runs against these formulas. Left out: statistics, flags and other objects of a few bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from covey.config.schema import Config
from covey.distributed.mesh import Mesh
from covey.memory import head_dim
from covey.models.architectures import layers_of


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes.

    Example: Qwen2.5-7B has width 3584, hidden 18944, layers 28, heads 28, kv_heads 4, head_dim 128, vocab 152064,
    layer_params 233,057,792, table_params 544,997,376, tied False.
    """

    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layer_params: int  # of one layer
    table_params: int  # of the embedding, or of the head
    tied: bool  # both are one tensor

    @classmethod
    def of(cls, model: Any) -> Shape:
        """Of a causal language model, which needs no weights."""
        text = model.config.get_text_config()
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        return cls(
            width=text.hidden_size,
            hidden=text.intermediate_size,
            layers=text.num_hidden_layers,
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_dim=head_dim(text),
            vocab=text.vocab_size,
            layer_params=sum(p.numel() for p in layers_of(model)[0].parameters()),
            table_params=embedding.numel(),
            tied=embedding is head,
        )

    @property
    def params(self) -> int:
        """Of the model, without the last norm."""
        return self.layers * self.layer_params + self.table_params * (1 if self.tied else 2)


@dataclass(frozen=True)
class Work:
    """What a data-parallel rank runs in an optimizer step."""

    micro_batches: int
    tokens: int  # packed tokens of all of them together, padding included
    targets: int  # response tokens


def update_traffic(config: Config, shape: Shape, mesh: Mesh, work: Work, *, size: int) -> dict[str, float]:
    """Bytes that a rank sends for the gradient of one optimizer step; size: bytes of a number in compute."""
    layers, tables = _held(shape, mesh)
    shards, replicas = mesh.dp_shard * mesh.cp, mesh.dp_replicate
    every = config.parallel.reduce_every_micro_batch
    reduced = work.micro_batches if every else 1
    gathered = size * (2 * layers + tables)  # a layer before its forward and again before its backward
    found = {
        "gather weights": work.micro_batches * gathered * _share(shards),
        "reduce gradients": reduced * 4 * (layers + tables) * _share(shards),
        "sum replicas": 4 * (layers + tables) / shards * 2 * _share(replicas),
        "tensor parallel": _tensor_parallel(config, shape, mesh, work, size) if mesh.tp > 1 else 0.0,
        "context parallel": _context_parallel(config, shape, mesh, work, size) if mesh.cp > 1 else 0.0,
        "pipeline": 0.0,
    }
    if mesh.pp > 1:  # hidden states to the next stage, their gradients to the one before; the ends send one of them
        borders = 2 * (mesh.pp * config.parallel.pp_chunks - 1) / mesh.pp
        cut = mesh.cp * (mesh.tp if config.parallel.sequence_parallel else 1)
        found["pipeline"] = borders * work.tokens * shape.width * size / cut
    return {name: amount for name, amount in found.items() if amount}


def rollout_traffic(shape: Shape, mesh: Mesh, *, size: int) -> float:
    """Bytes that a rank sends so that every rank has the weights for a rollout (divided by tp)."""
    layers, tables = _held(shape, mesh)
    own = size * (layers + tables)
    return own * _share(mesh.dp_shard * mesh.cp) + (own * _share(mesh.pp) if mesh.pp > 1 else 0.0)


def _held(shape: Shape, mesh: Mesh) -> tuple[float, float]:
    """Parameters of layers, of embedding and head that a stage holds on average before data parallelism cuts them."""
    tables = shape.table_params * (1 if shape.tied and mesh.pp == 1 else 2)
    return shape.layers * shape.layer_params / mesh.pp / mesh.tp, tables / mesh.pp / mesh.tp


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _tensor_parallel(config: Config, shape: Shape, mesh: Mesh, work: Work, size: int) -> float:
    """All-reduces of (T, D), or with sequence parallelism a gather and a reduce-scatter of the same bytes each."""
    layers = shape.layers / mesh.pp
    ends = 2 / mesh.pp  # after the embedding, before the head
    again = 1.5 if config.parallel.sequence_parallel else 1.0  # recomputing stops before the last sum of a layer
    times = 4 * layers + ends + (again * layers if config.model.gradient_checkpointing else 0)
    hidden = work.tokens / mesh.cp * shape.width * size
    head = 12 * work.targets / mesh.cp * (mesh.tp - 1) / mesh.pp  # three fp32 numbers a response token
    return times * hidden * 2 * _share(mesh.tp) + head


def _context_parallel(config: Config, shape: Shape, mesh: Mesh, work: Work, size: int) -> float:
    """Queries, keys, values and outputs of every layer, tokens for heads; logprobs and entropies at the end."""
    heads, kv_heads = shape.heads // mesh.tp, shape.kv_heads // mesh.tp
    kv_heads = heads if kv_heads % mesh.cp else kv_heads
    passes = 3 if config.model.gradient_checkpointing else 2
    numbers = passes * shape.layers / mesh.pp * (2 * heads + 2 * kv_heads) * shape.head_dim * work.tokens / mesh.cp
    return (numbers * size + 2 * 2 * 4 * work.targets / mesh.pp) * _share(mesh.cp)
