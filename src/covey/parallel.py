"""The trained model over all ranks of a mesh: cut by tensor parallelism, split into stages, sharded, used as if whole.

This file joins `models` (what a family's matrices mean) and `distributed` (how they are cut). On one process it adds
nothing: the model is run and differentiated as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from covey.distributed.collectives import send_to_all, wait_for_all
from covey.distributed.fsdp import Sharding, full_tensor, local_tensor
from covey.distributed.gradients import GradientNorm
from covey.distributed.mesh import Mesh
from covey.distributed.pieces import Cut, places
from covey.distributed.pipeline import Pipeline
from covey.distributed.pipeline_order import describe_stages, layers_of_chunks
from covey.distributed.tensor_parallel import TensorParallel, cut_layers, whole_tensor
from covey.distributed.vocabulary import CutHead, cut_logprobs, cut_vocabulary
from covey.models.adapters import has_adapter, is_adapter_weight, merged_weights, plain_name, save_adapter
from covey.models.architectures import architecture, layers_of
from covey.models.attention import PackedPlan, attends_by_reference
from covey.models.finite import watch_outputs
from covey.models.load import export_model
from covey.models.scoring import ScoringModel
from covey.models.stages import Stage
from covey.models.weight_files import allocate, weight_files_of
from covey.passes import Passes, StagePart
from covey.types import Segment


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
        pp_chunks: int = 1,
        pp_layers: Sequence[int] | None = None,
        reduce_every_micro_batch: bool = False,
    ) -> None:
        """Cut, split and shard `model` in place; ValueError when its sizes do not allow the degrees.

        pp_chunks, pp_layers: pieces of the layers on each pipeline rank, and how many layers each piece has.
        """
        self.model = model
        self.mesh = mesh
        self.compute_dtype = compute_dtype
        self._device = device
        self.num_parameters = sum(p.numel() for p in model.parameters())  # of all ranks together
        self._tp: TensorParallel | None = None
        if mesh.tp * mesh.cp > 1:
            check_heads(model, mesh.tp, mesh.cp)
        if mesh.tp > 1:
            self._tp = _cut_model(model, mesh, sequence_parallel=sequence_parallel)
        head = None if self._tp is None else _cut_head(model, self._tp)
        self._part: StagePart | None = None
        self._stages: dict[str, str] = {}
        if mesh.pp > 1:
            chunks = layers_of_chunks(len(layers_of(model)), mesh.pp, pp_chunks, pp_layers)
            stage = Stage(model, chunks, rank=mesh.pp_rank, num_ranks=mesh.pp)
            width = model.config.get_text_config().hidden_size
            pipeline = Pipeline(mesh, chunks_per_rank=pp_chunks, width=width, dtype=compute_dtype, device=device)
            self._part = StagePart(stage, pipeline)
            self._stages = describe_stages(chunks, mesh.pp)
        self._scoring = ScoringModel(
            model,
            temperature=temperature,
            logits_chunk_bytes=logits_chunk_bytes,
            whole=mesh.world == 1,
            head=head,
            stage=None if self._part is None else self._part.stage,
        )
        self._sharding: Sharding | None = None
        if mesh.world > 1:
            layers = layers_of(model) if self._part is None else self._part.stage.layers()
            self._sharding = Sharding(
                self._scoring,
                layers,
                mesh,
                compute_dtype=compute_dtype,
                reduce_every_micro_batch=reduce_every_micro_batch,
            )
            self._fill()
            self._run_once()
        passes = Passes(self._scoring, mesh, tp=self._tp, sharding=self._sharding, part=self._part, device=device)
        self.score, self.accumulate = passes.score, passes.accumulate

    def describe(self) -> dict[str, str]:
        """The layout for the start-up table."""
        return self.mesh.describe() | self._stages

    @property
    def cuts(self) -> dict[str, Cut]:
        """How tensor parallelism cut the parameters, by name."""
        return {} if self._tp is None else self._tp.cuts

    def move(self, device: torch.device) -> None:
        """Move this rank's weights to another memory; they must be back on the mesh's device when the model runs."""
        self._scoring.to(device)
        if self._sharding is None:
            self.model.tie_weights()  # as after loading: not every device's `to` keeps tied weights one

    def watch(self) -> None:
        """Debug mode: raise at the first module whose output is not finite."""
        watch_outputs(self.model)
        watch_outputs(self._scoring, "log-probabilities and entropies")

    def release(self) -> None:
        """Free gathered weights after forwards without backward."""
        if self._sharding is not None:
            self._sharding.reshard()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, this rank (with its tensor-parallel ranks) runs the model without the others.

        Memory: the whole model in the compute dtype, divided by the tensor-parallel degree only.
        """
        with ExitStack() as stack:
            if self._sharding is not None:
                stack.enter_context(self._sharding.gathered())
            if self._tp is not None:
                stack.enter_context(self._tp.whole_sequences())
            if self._part is not None:
                stack.enter_context(self._part.stage.whole(self._weights_of_stages(self._part.stage)))
            yield

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Callable[[Sequence[Tensor | None]], Tensor]:
        """The norm of the whole gradient, for an optimizer over `parameters` of the model."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        tied = set() if self._part is None else self._part.stage.tied
        return GradientNorm(self.mesh, [names[id(p)] for p in parameters], device=self._device, tp=self._tp, tied=tied)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The whole of the parameter `name`, or of its gradient, from every rank's part."""
        group = None if self._tp is None else self._tp.group
        return whole_tensor(full_tensor(tensor), self.cuts.get(name), group)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Named weights as Hugging Face spells them, whole, an adapter merged; sharded ones are gathered one by one."""
        return merged_weights(self.model, self._whole_weights(lambda name: True))

    def _whole_weights(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """The weights of wanted names as the model has them, whole, in the order of its state dict."""
        own = self.model.state_dict()
        if self._part is None:
            for name, tensor in own.items():
                if wanted(name):
                    yield name, self.whole(name, tensor)
            return
        for name, weight in self._part.stage.weights.items():
            if not wanted(name):
                continue
            if self.mesh.pp_rank == weight.owner:
                tensor = self.whole(name, own[name]).contiguous()
            else:
                shape = list(weight.shape)
                if name in self.cuts:
                    shape[self.cuts[name].dim] = self.cuts[name].total
                tensor = torch.empty(shape, dtype=weight.dtype, device=self._device)
            yield name, send_to_all(tensor, weight.owner, self.mesh.pp_group, what=f"weight {name}")

    def export(self, tokenizer: Any, directory: Path) -> None:
        """Write the model, an adapter merged into it, as a Hugging Face directory, on the first rank."""
        if self._sharding is None and not has_adapter(self.model):
            export_model(self.model, tokenizer, directory)
            return
        # A tied weight under one of its names.
        names = dict(self.model.named_parameters()) if self._part is None else self._part.stage.parameters
        once = {plain_name(name) for name in names}
        weights: dict[str, Tensor] = {}
        for name, tensor in self.weights():
            if self.mesh.is_main and name in once:
                weights[name] = tensor.to("cpu", self.compute_dtype)
        if self.mesh.is_main:
            with nullcontext() if self._part is None else self._part.stage.whole({}):
                export_model(self.model, tokenizer, directory, weights=weights, dtype=self.compute_dtype)
        wait_for_all(self.mesh.world_group, what="export of the model")

    def export_adapter(self, directory: Path) -> None:
        """Write the model's adapter as peft reads it, on the first rank."""
        own = self._whole_weights(is_adapter_weight)
        weights = {name: tensor.to("cpu", self.compute_dtype) for name, tensor in own}
        if self.mesh.is_main:
            save_adapter(self.model, weights, directory)
        wait_for_all(self.mesh.world_group, what="export of the adapter")

    def _weights_of_stages(self, stage: Stage) -> dict[str, Tensor]:
        """Every weight, from the rank that has it; inside `Sharding.gathered`."""
        own = dict(self.model.named_parameters())
        found = {}
        for name, weight in stage.parameters.items():
            if self.mesh.pp_rank == weight.owner:
                tensor = own[name].detach()
            else:
                tensor = torch.empty(weight.shape, dtype=self.compute_dtype, device=self._device)
            found[name] = send_to_all(tensor, weight.owner, self.mesh.pp_group, what=f"weight {name}")
        return found

    def _fill(self) -> None:
        """Read this rank's pieces of a model that was built without memory."""
        files = weight_files_of(self.model)
        if files is None:
            return
        empty = {name: parameter for name, parameter in self.model.named_parameters() if parameter.is_meta}
        allocate(self._scoring, self._device)
        found = places(self.model, self.mesh, self.cuts)
        targets = {plain_name(name): (local_tensor(parameter), found[name]) for name, parameter in empty.items()}
        wanted = {
            name: tuple(slice(o, o + n) for o, n in zip(place.offsets, piece.shape, strict=True))
            for name, (piece, place) in targets.items()
            if piece.numel()
        }
        with torch.no_grad():
            for name, values in files.read(wanted):
                targets[name][0].copy_(values)
        self.model.covey_weight_files = None

    def _run_once(self) -> None:
        """FSDP2 takes the first module that runs for the root: let it be the real one, not a layer in a rollout."""
        tokens = torch.zeros(self.mesh.tp, dtype=torch.int64, device=self._device)
        reference = attends_by_reference(self.model)
        plan = PackedPlan([Segment(0, self.mesh.tp, None)], self._device, reference=reference)
        hidden, chunk = None, self.mesh.pp_rank
        if self._part is not None and chunk > 0:
            cut = self._tp is not None and self._tp.sequence
            hidden = self._part.pipeline.buffer(1 if cut else self.mesh.tp).zero_()
        with torch.no_grad():
            self._scoring(tokens, tokens, plan, tokens[:1], tokens[:1], hidden=hidden, chunk=chunk)
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
