"""A causal language model with its head as one module: packed tokens in, log-probabilities and entropies out.

One module, so that whoever wraps it (sharded weights) covers the layers and the head's weight alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from covey.algorithm.logprobs import chunk_rows, logprobs_and_entropy
from covey.models.attention import AttentionPlan
from covey.models.load import head_weight
from covey.models.stages import Stage


class ScoringModel(nn.Module):
    """`model` is a Hugging Face causal LM that attends through `covey`.

    whole: the weights are this process's own, so the head's gradient may be added in place.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        logits_chunk_bytes: int,
        whole: bool = True,
        head: Callable[..., tuple[Tensor, Tensor]] | None = None,
        stage: Stage | None = None,
    ) -> None:
        """head: in place of logprobs_and_entropy, where the head's weight is a part of it. stage: of a pipeline."""
        super().__init__()
        self.stage = stage
        self.head = head
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
        num_kept: Tensor | None = None,  # (n,), see logprobs_and_entropy; only with a whole head
        *,
        hidden: Tensor | None = None,  # (1, T, D), what the chunk before made
        chunk: int = 0,
    ) -> Any:
        """(log-probabilities, entropies) of the targets, both (n,) fp32, differentiable.

        With a stage, only the layers of `chunk` run, and the result is (1, T, D) for the next one, if there is one.
        """
        inputs = self._inputs(input_ids) if hidden is None else {"inputs_embeds": hidden}
        with nullcontext() if self.stage is None else self.stage.only(chunk):
            out = self.model.base_model(
                **inputs, position_ids=position_ids.unsqueeze(0), plan=plan, use_cache=False
            ).last_hidden_state
        if self.stage is not None and not self.stage.is_last(chunk):
            return out
        return self._score(out[0], target_rows, target_ids, num_kept)

    def _score(
        self, hidden: Tensor, target_rows: Tensor, target_ids: Tensor, num_kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weight = head_weight(self.model)
        rows = chunk_rows(weight.shape[0], self.logits_chunk_bytes)
        chosen = hidden.index_select(0, target_rows)
        if self.head is not None:
            return self.head(chosen, weight, target_ids, temperature=self.temperature, rows_per_chunk=rows)
        return logprobs_and_entropy(
            chosen,
            weight,
            target_ids,
            temperature=self.temperature,
            rows_per_chunk=rows,
            add_to_grad=self._adds_in_place(weight),
            num_kept=num_kept,
        )

    def _inputs(self, input_ids: Tensor) -> dict[str, Tensor]:
        """The ids, or their embeddings where the table's gradient can be added in place."""
        table = self.model.get_input_embeddings()
        plain = type(table) is nn.Embedding and table.max_norm is None and not table.scale_grad_by_freq
        if plain and self._adds_in_place(table.weight) and torch.is_grad_enabled():
            return {"inputs_embeds": _Embedding.apply(input_ids, table.weight, table.padding_idx).unsqueeze(0)}
        return {"input_ids": input_ids.unsqueeze(0)}

    def _adds_in_place(self, weight: Tensor) -> bool:
        return self.whole and weight.is_leaf and weight.requires_grad and weight.dtype == torch.float32


class _Embedding(torch.autograd.Function):
    """A table's rows; backward adds to `weight.grad` directly, where torch would first make a table of zeros."""

    @staticmethod
    def forward(ctx: Any, input_ids: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(input_ids, weight)
        ctx.padding_idx = padding_idx
        return weight.index_select(0, input_ids)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        input_ids, weight = ctx.saved_tensors
        grad = grads[0]
        if ctx.padding_idx is not None:  # as torch: the padding row is not trained through the input
            grad = grad.masked_fill((input_ids == ctx.padding_idx)[:, None], 0.0)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, input_ids, grad)
        return None, None, None
