"""A causal language model with its head as one module: packed tokens in, log-probabilities and entropies out.

One module, so that whoever wraps it (sharded weights) covers the layers and the head's weight alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from covey.algorithm.logprobs import chunk_rows, logprobs_and_entropy
from covey.models.attention import AttentionPlan
from covey.models.load import head_weight


class ScoringModel(nn.Module):
    """`model` is a Hugging Face causal LM that attends through `covey`.

    whole: the weights are this process's own, so the head's gradient may be added in place.
    """

    def __init__(self, model: Any, *, temperature: float, logits_chunk_bytes: int, whole: bool = True) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.logits_chunk_bytes = logits_chunk_bytes
        self.whole = whole

    def forward(
        self,
        input_ids: Tensor,  # (T,)
        position_ids: Tensor,  # (T,)
        plan: AttentionPlan,
        target_rows: Tensor,  # (n,)
        target_ids: Tensor,  # (n,)
    ) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) of the targets, both (n,) fp32, differentiable."""
        hidden = self.model.base_model(
            input_ids=input_ids.unsqueeze(0), position_ids=position_ids.unsqueeze(0), plan=plan, use_cache=False
        ).last_hidden_state[0]
        weight = head_weight(self.model)
        return logprobs_and_entropy(
            hidden.index_select(0, target_rows),
            weight,
            target_ids,
            temperature=self.temperature,
            rows_per_chunk=chunk_rows(weight.shape[0], self.logits_chunk_bytes),
            add_to_grad=self.whole and weight.is_leaf and weight.dtype == torch.float32,
        )
