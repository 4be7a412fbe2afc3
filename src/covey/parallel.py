"""The trained model over all ranks of a mesh: cut by tensor parallelism, then sharded, and used as if it were whole.

This file joins `models` (what a family's matrices mean) and `distributed` (how they are cut). On one process it adds
nothing: the model is run and differentiated as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.distributed.collectives import wait_for_all
from covey.distributed.context_parallel import HeadExchange, combine
from covey.distributed.fsdp import Sharding, full_tensor
from covey.distributed.gradients import GradientNorm
from covey.distributed.mesh import Mesh
from covey.distributed.pieces import Cut
from covey.distributed.tensor_parallel import TensorParallel, cut_layers, whole_tensor
from covey.distributed.vocabulary import CutHead, cut_logprobs, cut_vocabulary
from covey.models.architectures import architecture, layers_of
from covey.models.attention import PackedPlan
from covey.models.load import export_model
from covey.models.packing import pad_batch
from covey.models.scoring import ScoringModel
from covey.types import PackedBatch, Segment


class ParallelModel:
    """A causal language model on this rank of `mesh`. Methods are called on all ranks, unless they say otherwise."""

    def __init__(
        self,
        model: Any,
        *,
        device: torch.device,
        temperature: float,
        logits_chunk_bytes: int,
        mesh: Mesh,
        compute_dtype: torch.dtype,
        sequence_parallel: bool = False,
    ) -> None:
        """Cut and shard `model` in place; ValueError when its sizes do not allow the tensor-parallel degree."""
        self.model = model
        self.mesh = mesh
        self.compute_dtype = compute_dtype
        self._device = device
        self._tp: TensorParallel | None = None
        if mesh.tp * mesh.cp > 1:
            check_heads(model, mesh.tp, mesh.cp)
        if mesh.tp > 1:
            self._tp = _cut_model(model, mesh, sequence_parallel=sequence_parallel)
        self._scoring = ScoringModel(
            model,
            temperature=temperature,
            logits_chunk_bytes=logits_chunk_bytes,
            whole=mesh.world == 1,
            head=None if self._tp is None else _cut_head(model, self._tp),
        )
        self._sharding: Sharding | None = None
        if mesh.world > 1:
            self._sharding = Sharding(self._scoring, layers_of(model), mesh, compute_dtype=compute_dtype)
            self._run_once()

    @property
    def cuts(self) -> dict[str, Cut]:
        """How tensor parallelism cut the parameters, by name."""
        return {} if self._tp is None else self._tp.cuts

    def forward(self, batch: PackedBatch, *, as_sampled: bool = False) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) of a micro-batch's response tokens, both (n,) fp32, differentiable.

        as_sampled: renormalised over the tokens that the sampler's filters kept.
        """
        if as_sampled and self._tp is not None:
            raise ValueError("algorithm.sampling_consistent needs whole logits: set parallel.tp to 1")
        cuts_tokens = self._tp.size if self._tp is not None and self._tp.sequence else 1
        batch = pad_batch(batch, cuts_tokens * self.mesh.cp)
        plan = PackedPlan(batch.segments, self._device)
        num_kept = batch.num_kept if as_sampled else None
        if self.mesh.cp > 1:
            return self._forward_part(batch, plan, num_kept)
        return self._scoring(batch.input_ids, batch.position_ids, plan, batch.target_rows, batch.target_ids, num_kept)

    def _forward_part(self, batch: PackedBatch, plan: PackedPlan, num_kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """`forward` of this context-parallel rank's share of the tokens, and the results of all of them."""
        group, share = self.mesh.cp_group, batch.num_tokens // self.mesh.cp
        mine = slice(self.mesh.cp_rank * share, (self.mesh.cp_rank + 1) * share)
        index = ((batch.target_rows >= mine.start) & (batch.target_rows < mine.stop)).nonzero().squeeze(1)
        logprobs, entropy = self._scoring(
            batch.input_ids[mine],
            batch.position_ids[mine],
            HeadExchange(plan, group),
            batch.target_rows[index] - mine.start,
            batch.target_ids[index],
            None if num_kept is None else num_kept[index],
        )
        total = len(batch.target_rows)
        return combine(logprobs, index, total, group), combine(entropy, index, total, group)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the loss's gradient; it is summed over data-parallel ranks once, with the `last` micro-batch."""
        if self._sharding is not None:
            self._sharding.sync_gradients(last)
            loss = loss * self._sharding.loss_scale
        loss.backward()

    def release(self) -> None:
        """Free gathered weights after forwards without backward."""
        if self._sharding is not None:
            self._sharding.reshard()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, this rank (with its tensor-parallel ranks) runs the model without the others."""
        if self._sharding is None:
            yield
        elif self._tp is None:
            with self._sharding.gathered():
                yield
        else:
            with self._sharding.gathered(), self._tp.whole_sequences():
                yield

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Callable[[Sequence[Tensor | None]], Tensor]:
        """The norm of the whole gradient, for an optimizer over `parameters` of the model."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return GradientNorm(self.mesh, [names[id(p)] for p in parameters], device=self._device, tp=self._tp)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of the parameter `name`, or of its gradient, from every rank's part."""
        group = None if self._tp is None else self._tp.group
        return whole_tensor(full_tensor(tensor), self.cuts.get(name), group)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Named weights as Hugging Face spells them, whole; sharded ones are gathered one by one."""
        for name, tensor in self.model.state_dict().items():
            yield name, self.whole(name, tensor)

    def export(self, tokenizer: Any, directory: Path) -> None:
        """Write the model as a Hugging Face directory, on the first rank."""
        if self._sharding is None:
            export_model(self.model, tokenizer, directory)
            return
        once = {name for name, _ in self.model.named_parameters()}  # a tied weight under one of its names
        weights: dict[str, Tensor] = {}
        for name, tensor in self.weights():
            if self.mesh.is_main and name in once:
                weights[name] = tensor.to("cpu", self.compute_dtype)
        if self.mesh.is_main:
            export_model(self.model, tokenizer, directory, weights=weights, dtype=self.compute_dtype)
        wait_for_all(self.mesh.world_group, what="export of the model")

    def _run_once(self) -> None:
        """FSDP2 takes the first module that runs for the root: let it be the real one, not a layer in a rollout."""
        tokens = torch.zeros(self.mesh.tp, dtype=torch.int64, device=self._device)
        plan = PackedPlan([Segment(0, self.mesh.tp, None)], self._device)
        with torch.no_grad():
            self._scoring(tokens, tokens, plan, tokens[:1], tokens[:1])
        self.release()


def check_heads(model: Any, tp: int, cp: int = 1) -> None:
    """ValueError when the tensor-parallel and context-parallel degrees do not divide the model's heads."""
    config = model.config.get_text_config()
    if config.num_attention_heads % (tp * cp):
        raise ValueError(
            f"parallel.tp={tp} x cp={cp} does not divide the model's num_attention_heads={config.num_attention_heads}; "
            "attention runs whole heads on every rank: choose degrees whose product divides it"
        )
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, key)) % tp:
            raise ValueError(
                f"parallel.tp={tp} does not divide the model's {key}={heads}; every rank needs whole heads: "
                "choose a divisor of both"
            )


def _cut_model(model: Any, mesh: Mesh, *, sequence_parallel: bool) -> TensorParallel:
    plan = architecture(model, f"parallel.tp={mesh.tp}")
    tp = TensorParallel(mesh, sequence_parallel=sequence_parallel)
    cut_layers(model, layers_of(model), plan, model.base_model.get_submodule(plan.final_norm), tp)
    cut_vocabulary(model, tp)
    return tp


def _cut_head(model: Any, tp: TensorParallel) -> Callable[..., tuple[Tensor, Tensor]]:
    head = model.get_output_embeddings()
    assert isinstance(head, CutHead)
    return partial(cut_logprobs, start=head.start, group=tp.group)
