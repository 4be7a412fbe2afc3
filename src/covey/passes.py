"""Micro-batches through the model: log-probabilities without gradient, and gradients that add up over all ranks.

One loop on a rank that holds all layers; on a stage of a pipeline the same through `distributed/pipeline.py`, where
only the last stage sees log-probabilities and computes the loss. Context-parallel ranks run a share of the tokens each
and get the results of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from covey.distributed.context_parallel import HeadExchange, combine
from covey.distributed.fsdp import Sharding
from covey.distributed.mesh import Mesh
from covey.distributed.pipeline import Pipeline
from covey.distributed.tensor_parallel import TensorParallel
from covey.models.attention import AttentionPlan, PackedPlan, attends_by_reference
from covey.models.packing import pad_batch
from covey.models.scoring import ScoringModel
from covey.models.stages import Stage
from covey.types import PackedBatch

LossOf = Callable[[PackedBatch, Tensor, Tensor], Tensor]  # (batch, log-probabilities, entropies) -> loss


@dataclass(frozen=True)
class StagePart:
    """What a rank of a pipeline has besides: its layers and its neighbours."""

    stage: Stage
    pipeline: Pipeline


@dataclass(frozen=True)
class _Inputs:
    """A micro-batch as this rank runs it; under context parallelism its share of the tokens."""

    tokens: tuple[Tensor, Tensor, AttentionPlan, Tensor, Tensor, Tensor | None]  # of ScoringModel.forward
    num_tokens: int  # of the hidden states between layers
    index: Tensor | None = None  # which of the micro-batch's targets are here; None: all
    num_targets: int = 0  # of the whole micro-batch, where some are elsewhere


class Passes:
    """Runs the micro-batches of this rank; every method is called on all ranks."""

    def __init__(
        self,
        scoring: ScoringModel,
        mesh: Mesh,
        *,
        tp: TensorParallel | None,
        sharding: Sharding | None,
        part: StagePart | None,
        device: torch.device,
    ) -> None:
        self._scoring = scoring
        self._mesh = mesh
        self._tp, self._sharding, self._part = tp, sharding, part
        self._device = device

    def score(
        self, batches: Sequence[PackedBatch], *, as_sampled: bool = False
    ) -> Iterator[tuple[PackedBatch, Tensor, Tensor]]:
        """Every batch with its response tokens' log-probabilities and entropies, both (n,) fp32, without gradient.

        Of the stages of a pipeline, only the last one gets any. as_sampled: renormalised over the tokens that the
        sampler's filters kept.
        """
        with torch.no_grad():
            if self._part is not None:
                yield from self._score_stages(batches, self._part.pipeline, as_sampled)
                return
            for batch in batches:
                inputs = self._inputs(batch, as_sampled)
                yield batch, *self._combined(inputs, self._scoring(*inputs.tokens))

    def accumulate(self, batches: Sequence[PackedBatch], loss_of: LossOf, *, as_sampled: bool = False) -> None:
        """Add the gradient of the sum of loss_of(batch, log-probabilities, entropies) over the batches of all ranks.

        Of the stages of a pipeline, only the last one calls it. Data-parallel ranks add up with the last batch.
        """
        if self._part is not None:
            self._accumulate_stages(batches, self._part, loss_of, as_sampled)
            return
        for i, batch in enumerate(batches):
            inputs = self._inputs(batch, as_sampled)
            loss = loss_of(batch, *self._combined(inputs, self._scoring(*inputs.tokens)))
            if self._sharding is not None:
                self._sharding.sync_gradients(i + 1 == len(batches))
                loss = loss * self._sharding.loss_scale
            loss.backward()

    def _inputs(self, batch: PackedBatch, as_sampled: bool) -> _Inputs:
        if as_sampled and self._tp is not None:
            raise ValueError("algorithm.sampling_consistent needs whole logits: set parallel.tp to 1")
        cuts_tokens = self._tp.size if self._tp is not None and self._tp.sequence else 1
        batch = pad_batch(batch, cuts_tokens * self._mesh.cp)
        num_kept = batch.num_kept if as_sampled else None
        plan = PackedPlan(batch.segments, self._device, reference=attends_by_reference(self._scoring.model))
        if self._mesh.cp == 1:
            rows, ids = batch.target_rows, batch.target_ids
            tokens = (batch.input_ids, batch.position_ids, plan, rows, ids, num_kept)
            return _Inputs(tokens, batch.num_tokens // cuts_tokens)
        share = batch.num_tokens // self._mesh.cp
        mine = slice(self._mesh.cp_rank * share, (self._mesh.cp_rank + 1) * share)
        rows = batch.target_rows.cpu()  # chosen by a mask, which is a host's work
        index = ((rows >= mine.start) & (rows < mine.stop)).nonzero().squeeze(1).to(self._device)
        tokens = (
            batch.input_ids[mine],
            batch.position_ids[mine],
            HeadExchange(plan, self._mesh.cp_group),
            batch.target_rows.index_select(0, index) - mine.start,
            batch.target_ids.index_select(0, index),
            None if num_kept is None else num_kept.index_select(0, index),
        )
        return _Inputs(tokens, share // cuts_tokens, index, len(batch.target_rows))

    def _combined(self, inputs: _Inputs, mine: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) of a micro-batch's response tokens, of all context-parallel ranks."""
        if inputs.index is None:
            return mine
        logprobs, entropy = (combine(x, inputs.index, inputs.num_targets, self._mesh.cp_group) for x in mine)
        return logprobs, entropy

    def _score_stages(
        self, batches: Sequence[PackedBatch], pipeline: Pipeline, as_sampled: bool
    ) -> Iterator[tuple[PackedBatch, Tensor, Tensor]]:
        inputs = [self._inputs(batch, as_sampled) for batch in batches]
        found: list[tuple[PackedBatch, Tensor, Tensor]] = []

        def forward(chunk: int, micro: int, hidden: Tensor | None) -> Tensor | None:
            out = self._scoring(*inputs[micro].tokens, hidden=hidden, chunk=chunk)
            if chunk + 1 < pipeline.num_chunks:
                return out
            found.append((batches[micro], *self._combined(inputs[micro], out)))
            return None

        pipeline.run([one.num_tokens for one in inputs], forward)
        yield from found

    def _accumulate_stages(
        self, batches: Sequence[PackedBatch], part: StagePart, loss_of: LossOf, as_sampled: bool
    ) -> None:
        assert self._sharding is not None
        sharding, last_chunk = self._sharding, part.pipeline.num_chunks - 1
        inputs = [self._inputs(batch, as_sampled) for batch in batches]

        def forward(chunk: int, micro: int, hidden: Tensor | None) -> Tensor:
            out = self._scoring(*inputs[micro].tokens, hidden=hidden, chunk=chunk)
            if chunk < last_chunk:
                return out
            return loss_of(batches[micro], *self._combined(inputs[micro], out)) * sharding.loss_scale

        def backward(chunk: int, output: Tensor, gradient: Tensor | None, last: bool) -> None:
            # Embedding, norm and head belong to no layer; they are used by the first and the last chunk.
            sharding.sync_gradients(last, of=part.stage.layers(chunk), rest=chunk in (0, last_chunk))
            if output.requires_grad:  # False: nothing up to here is trained
                output.backward(gradient)

        part.pipeline.run([one.num_tokens for one in inputs], forward, backward)
