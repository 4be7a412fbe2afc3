"""What Covey must know of a family: where its layers are, how each matrix may be cut, what its classes are. Data only.

A family without a row runs on one process and data parallel (its layers are found by `layers_of`); tensor parallelism
and fused kernels need a row. Names are those of transformers' modules, relative to a decoder layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Architecture:
    """One decoder family.

    Example: Qwen3 cuts q, k, v, gate and up by rows of the weight (each rank gets some heads or channels), o and down
    by columns (each rank gives a partial sum), and repeats q_norm and k_norm, which see only the rank's heads.
    """

    modeling: str  # transformers' module of the family
    prefix: str  # of its classes' names

    attention: str = "self_attn"
    mlp: str = "mlp"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    column: tuple[str, ...] = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    row: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj")
    final_norm: str = "norm"  # of the base model
    head_norms: tuple[str, ...] = ()  # repeated weights applied to single heads

    def class_of(self, operation: str) -> str:
        """The class whose forward contains a small operation that a fused kernel may replace."""
        return self.prefix + {"rms_norm": "RMSNorm", "rotary": "Attention", "swiglu": "MLP"}[operation]


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("transformers.models.llama.modeling_llama", "Llama"),
    "qwen2": Architecture("transformers.models.qwen2.modeling_qwen2", "Qwen2"),
    "qwen3": Architecture(
        "transformers.models.qwen3.modeling_qwen3", "Qwen3", head_norms=("self_attn.q_norm", "self_attn.k_norm")
    ),
}


def architecture(model: Any, why: str) -> Architecture:
    """The row of a model's family; ValueError with the known ones when there is none. `why` names what needs it."""
    kind = model.config.model_type
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{why} is not available for model_type {kind!r} (known: {', '.join(sorted(ARCHITECTURES))}): add a row to "
            "covey.models.architectures.ARCHITECTURES, or set the degree to 1"
        )
    return ARCHITECTURES[kind]


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder layers of a causal language model."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"{type(model).__name__} keeps its decoder layers elsewhere than in `base_model.layers`, so its weights "
            "cannot be sharded; run it on one process"
        )
    return layers
