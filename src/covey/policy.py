"""The model under training: log-probabilities of a rollout, and the update.

The loss of an optimizer step is `sum(token_loss * weight)`. The weights come from the lengths of all responses of that
optimizer step (algorithm/aggregation.py) before the first forward, so micro-batches only add up: how they were cut
does not change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from covey.algorithm.aggregation import token_weights
from covey.algorithm.correction import high_entropy_tokens
from covey.algorithm.objective import Objective, Tokens, token_objective
from covey.config.schema import AlgorithmConfig, DistillationConfig
from covey.distributed.collectives import sum_tensor
from covey.distributed.mesh import Mesh
from covey.models.packing import pack, response_lengths
from covey.parallel import ParallelModel
from covey.steering import Steering
from covey.totals import UpdateTotals
from covey.types import Group, PackedBatch, StepBatch, StepStats


class _Optimizer(Protocol):
    def step(self, lr: float) -> float: ...


@dataclass(frozen=True)
class ForwardLimits:
    """How a batch is cut; changes memory and speed, not the numbers."""

    max_tokens_per_micro_batch: int
    logits_chunk_bytes: int


class Policy:
    """A causal language model that scores and learns from groups. Also serves as the frozen reference."""

    def __init__(
        self,
        model: Any,
        *,
        device: torch.device,
        temperature: float,
        limits: ForwardLimits,
        mesh: Mesh | None = None,
        compute_dtype: torch.dtype = torch.float32,
        sequence_parallel: bool = False,
        sampling_consistent: bool = False,
        pp_chunks: int = 1,
        pp_layers: Sequence[int] | None = None,
        reduce_every_micro_batch: bool = False,
    ) -> None:
        """mesh: the ranks that share the model, which is then cut and sharded in place (parallel.py).

        sampling_consistent: log-probabilities are of the distribution that the sampler's filters left.
        """
        self.model = model
        self.device = device
        self.temperature = temperature
        self.limits = limits
        self.sampling_consistent = sampling_consistent
        self.optimizer_steps = 0
        self.steering = Steering()  # of the KL and entropy coefficients
        self.mesh = mesh or Mesh()
        self.parallel = ParallelModel(
            model,
            device=device,
            temperature=temperature,
            logits_chunk_bytes=limits.logits_chunk_bytes,
            mesh=self.mesh,
            compute_dtype=compute_dtype,
            sequence_parallel=sequence_parallel,
            pp_chunks=pp_chunks,
            pp_layers=pp_layers,
            reduce_every_micro_batch=reduce_every_micro_batch,
        )
        self.gathered = self.parallel.gathered
        self.weights = self.parallel.weights
        self.export = self.parallel.export
        self.export_adapter = self.parallel.export_adapter

    def logprobs(self, groups: list[Group]) -> Tensor:
        """Log-probabilities (N,) of all response tokens of the step in canonical order, on every rank."""
        self.model.eval()
        return self._scores(groups, 0)

    def needs_old_logprobs(self, algorithm: AlgorithmConfig, num_prompts: int) -> bool:
        """False when the whole rollout is one optimizer step: then the old policy is the current one, exactly."""
        return algorithm.epochs > 1 or (algorithm.mini_batch_size or num_prompts) < num_prompts

    def update(
        self,
        batch: StepBatch,
        algorithm: AlgorithmConfig,
        *,
        optimizer: _Optimizer,
        lr: Callable[[int], float],
        max_response_length: int,
        distillation: DistillationConfig | None = None,
    ) -> StepStats:
        """`epochs` passes over the rollout, one optimizer step for every `mini_batch_size` prompts.

        lr(optimizer step) is the learning rate. An optimizer step whose gradient is not finite is skipped and counted.
        """
        self.model.train()
        num_prompts = len(batch.groups)
        mini = algorithm.mini_batch_size or num_prompts
        step = _StepTensors(batch, self.device)
        objective = self.steering.objective(algorithm, distillation)
        totals = UpdateTotals()
        for epoch in range(algorithm.epochs):
            for start in range(0, num_prompts, mini):
                chosen = list(range(start, min(start + mini, num_prompts)))
                weights = self._response_weights(batch, chosen, algorithm, max_response_length)
                if algorithm.top_entropy_share < 1.0:
                    step.keep = self._high_entropy_tokens(batch.groups, chosen, algorithm.top_entropy_share)
                micros = self._pack(batch.groups, chosen)
                totals.packed_tokens += sum(micro.num_tokens for micro in micros)
                loss_of = partial(
                    self._micro_loss,
                    step=step,
                    weights=weights,
                    objective=objective,
                    totals=totals,
                    first=epoch == 0,
                )
                self.parallel.accumulate(micros, loss_of, as_sampled=self.sampling_consistent)
                rate = lr(self.optimizer_steps)
                totals.add_optimizer_step(optimizer.step(rate), rate)
                self.optimizer_steps += 1
        values = totals.metrics(self.mesh)
        num_responses = sum(len(group.responses) for group in batch.groups)
        values |= self.steering.after_step(algorithm, values, num_responses=num_responses)
        return StepStats(values)

    def _high_entropy_tokens(self, groups: list[Group], chosen: list[int], share: float) -> Tensor:
        """(N,) bool: the tokens of highest entropy among those of the chosen groups, before their optimizer step."""
        entropy = self._scores(groups, 1, chosen).cpu()  # chosen by a mask, which is a host's work
        in_group = [torch.full((sum(response_lengths([g])),), p in set(chosen)) for p, g in enumerate(groups)]
        of_chosen = torch.cat(in_group)
        keep = torch.zeros_like(of_chosen)
        keep[of_chosen] = high_entropy_tokens(entropy[of_chosen], share=share)
        return keep.to(self.device)

    def imitate(self, groups: list[Group], *, optimizer: _Optimizer, lr: float) -> dict[str, float]:
        """One optimizer step on demonstrations (groups of one response): mean cross-entropy per response token."""
        self.model.train()
        num_tokens = sum(response_lengths(groups))
        total = torch.zeros((), device=self.device)

        def loss_of(batch: PackedBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
            loss = -logprobs.sum() / num_tokens
            total.add_(loss.detach())
            return loss

        self.parallel.accumulate(self._pack(groups), loss_of)
        sum_tensor(total, self.mesh.step_group, what="loss of the demonstrations")
        norm = optimizer.step(lr)
        self.optimizer_steps += 1
        return {"sft/loss": float(total), "actor/grad_norm": norm, "actor/lr": lr}

    @torch.no_grad()
    def _scores(self, groups: list[Group], which: int, only: list[int] | None = None) -> Tensor:
        """(N,) log-probabilities (which=0) or entropies (1) of all ranks' tokens; 0 for groups that are left out."""
        out = torch.zeros(sum(response_lengths(groups)), dtype=torch.float32, device=self.device)
        for batch, *found in self.parallel.score(self._pack(groups, only), as_sampled=self.sampling_consistent):
            out.index_copy_(0, batch.token_index, found[which])
        self.parallel.release()
        return sum_tensor(out, self.mesh.step_group, what="log-probabilities of the step")

    def _pack(self, groups: list[Group], only: list[int] | None = None) -> list[PackedBatch]:
        """This rank's micro-batches."""
        return pack(
            groups,
            max_tokens=self.limits.max_tokens_per_micro_batch,
            device=self.device,
            only=only,
            rank=self.mesh.dp_rank,
            world=self.mesh.dp,
            context_cost=1.0 / (6 * self.model.config.get_text_config().hidden_size),
        )

    def _response_weights(
        self, batch: StepBatch, chosen: list[int], algorithm: AlgorithmConfig, max_response_length: int
    ) -> Tensor:
        """(B,) weight of each token of every response of the step; 0 outside the mini-batch."""
        responses = [r for group in batch.groups for r in group.responses]
        sizes = [len(group.responses) for group in batch.groups]
        in_mini = np.repeat(np.isin(np.arange(len(sizes)), chosen), sizes)
        truncated = np.array([r.finish_reason == "length" for r in responses], dtype=bool)
        included = ~truncated if algorithm.mask_truncated else np.ones_like(truncated)
        weights = np.zeros(len(responses))
        weights[in_mini] = token_weights(
            np.array(response_lengths(batch.groups))[in_mini],
            included[in_mini],
            algorithm.aggregation,
            num_responses=int(in_mini.sum()),
            max_response_length=max_response_length,
        )
        return torch.tensor(weights, dtype=torch.float32, device=self.device)

    def _micro_loss(
        self,
        micro: PackedBatch,
        logprobs: Tensor,
        entropy: Tensor,
        *,
        step: _StepTensors,
        weights: Tensor,
        objective: Objective,
        totals: UpdateTotals,
        first: bool,
    ) -> Tensor:
        """The micro-batch's part of the optimizer step's loss."""
        if not micro.response_ids:  # nothing was left for this rank, which must run all the same
            return logprobs.sum()
        response = torch.tensor(micro.response_ids, device=self.device).index_select(0, micro.response_index)
        weight = weights.index_select(0, response)

        def mine(of_step: Tensor) -> Tensor:
            return of_step.index_select(0, micro.token_index)

        old = logprobs.detach() if step.old_logprobs is None else mine(step.old_logprobs)
        rollout = mine(step.rollout_logprobs)
        out = token_objective(
            Tokens(
                logprobs=logprobs,
                entropy=entropy,
                old_logprobs=old,
                rollout_logprobs=rollout,
                ref_logprobs=None if step.ref_logprobs is None else mine(step.ref_logprobs),
                teacher_logprobs=None if step.teacher_logprobs is None else mine(step.teacher_logprobs),
                advantages=step.advantages.index_select(0, response),
                response_index=micro.response_index,
                num_responses=len(micro.response_ids),
                keep=None if step.keep is None else mine(step.keep),
            ),
            objective,
        )
        weighted = (out.total * weight).sum()
        totals.add_tokens(
            tokens=torch.ones_like(old),
            loss=weighted,
            pg_loss=out.policy.loss * weight,
            entropy=entropy,
            clipped=out.policy.clipped,
            ppo_kl=torch.where(out.policy.finite, old - logprobs, 0.0),
            nonfinite=~out.policy.finite,
            **({} if out.kl is None else {"kl": out.kl}),
            **({} if out.rollout_weight is None else {"rollout_weight": out.rollout_weight}),
            **({} if out.distill_kl is None else {"distill_kl": out.distill_kl}),
        )
        if first:  # before any optimizer step of this rollout has moved the policy
            totals.add_gap(old - rollout)
        return weighted


class _StepTensors:
    """What a step knows per token or per response, on the device."""

    def __init__(self, batch: StepBatch, device: torch.device) -> None:
        self.advantages = torch.tensor(batch.advantages.reshape(-1), dtype=torch.float32, device=device)
        self.old_logprobs = batch.old_logprobs
        self.ref_logprobs = batch.ref_logprobs
        self.teacher_logprobs = batch.teacher_logprobs
        self.keep: Tensor | None = None  # (N,) bool, tokens whose policy loss counts; None: all
        sampled = [lp for group in batch.groups for response in group.responses for lp in response.logprobs]
        self.rollout_logprobs = torch.tensor(sampled, dtype=torch.float32, device=device)
