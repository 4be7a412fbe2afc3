"""The one attention function that Covey's models run, registered with transformers as `covey`.

The model is called on one row of packed tokens, `model.model(input_ids=(1, T), position_ids=(1, T), plan=plan,
use_cache=False)`; transformers hands the keyword `plan` to every layer. A plan knows which tokens see which: the
training plan below (`PackedPlan`), or the decode plan of the native rollout engine.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from transformers import AttentionInterface

ATTENTION = "covey"


class AttentionPlan(Protocol):
    """Who sees whom in a packed row."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention output (T, N, H) for query (N, T, H), key and value (N_kv, T, H), rotary already applied."""
        ...


def attention_forward(
    module: Any,
    query: Tensor,  # (1, N, T, H)
    key: Tensor,  # (1, N_kv, T, H)
    value: Tensor,  # (1, N_kv, T, H)
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    plan: AttentionPlan | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """The signature transformers calls; returns ((1, T, N, H), None)."""
    if plan is None:
        raise ValueError("the `covey` attention needs plan=...; for plain use call model.set_attn_implementation('sdpa')")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return plan.attend(module.layer_idx, query[0], key[0], value[0], scale).unsqueeze(0), None


AttentionInterface.register(ATTENTION, attention_forward)
