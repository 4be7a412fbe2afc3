"""The model under training: log-probabilities of a rollout, and the update.

The loss of an optimizer step is `sum(token_loss * weight)`. The weights come from the lengths of all responses of that
optimizer step (algorithm/aggregation.py) before the first forward, so micro-batches only add up: how they were cut
does not change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from covey.algorithm.aggregation import token_weights
from covey.algorithm.kl import KL_ESTIMATORS
from covey.algorithm.logprobs import chunk_rows, logprobs_and_entropy
from covey.algorithm.losses import LOSSES, LossOptions
from covey.config.schema import AlgorithmConfig
from covey.models.attention import PackedPlan
from covey.models.load import head_weight
from covey.models.packing import pack, response_lengths
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

    def __init__(self, model: Any, *, device: torch.device, temperature: float, limits: ForwardLimits) -> None:
        self.model = model
        self.device = device
        self.temperature = temperature
        self.limits = limits
        self.optimizer_steps = 0

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) of a micro-batch's response tokens, both (n,) fp32, differentiable."""
        hidden = self.model.base_model(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.position_ids.unsqueeze(0),
            plan=PackedPlan(batch.segments, self.device),
            use_cache=False,
        ).last_hidden_state[0]
        weight = head_weight(self.model)
        return logprobs_and_entropy(
            hidden.index_select(0, batch.target_rows),
            weight,
            batch.target_ids,
            temperature=self.temperature,
            rows_per_chunk=chunk_rows(weight.shape[0], self.limits.logits_chunk_bytes),
        )

    @torch.no_grad()
    def logprobs(self, groups: list[Group]) -> Tensor:
        """Log-probabilities (N,) of all response tokens in canonical order."""
        out = torch.zeros(sum(response_lengths(groups)), dtype=torch.float32, device=self.device)
        self.model.eval()
        for batch in self._pack(groups):
            out[batch.token_index] = self.forward(batch)[0]
        return out

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
    ) -> StepStats:
        """`epochs` passes over the rollout, one optimizer step for every `mini_batch_size` prompts.

        lr(optimizer step) is the learning rate. An optimizer step whose gradient is not finite is skipped and counted.
        """
        self.model.train()
        num_prompts = len(batch.groups)
        mini = algorithm.mini_batch_size or num_prompts
        step = _StepTensors(batch, self.device)
        totals = _Totals()
        for epoch in range(algorithm.epochs):
            for start in range(0, num_prompts, mini):
                chosen = list(range(start, min(start + mini, num_prompts)))
                weights = self._response_weights(batch, chosen, algorithm, max_response_length)
                for micro in self._pack(batch.groups, chosen):
                    loss = self._micro_loss(micro, step, weights, algorithm, totals, first=epoch == 0)
                    loss.backward()
                rate = lr(self.optimizer_steps)
                totals.add_optimizer_step(optimizer.step(rate), rate)
                self.optimizer_steps += 1
        return StepStats(totals.metrics(algorithm))

    def imitate(self, groups: list[Group], *, optimizer: _Optimizer, lr: float) -> dict[str, float]:
        """One optimizer step on demonstrations (groups of one response): mean cross-entropy per response token."""
        self.model.train()
        num_tokens = sum(response_lengths(groups))
        total = torch.zeros((), device=self.device)
        for batch in self._pack(groups):
            loss = -self.forward(batch)[0].sum() / num_tokens
            loss.backward()
            total += loss.detach()
        norm = optimizer.step(lr)
        self.optimizer_steps += 1
        return {"sft/loss": float(total), "actor/grad_norm": norm, "actor/lr": lr}

    def _pack(self, groups: list[Group], only: list[int] | None = None) -> list[PackedBatch]:
        return pack(groups, max_tokens=self.limits.max_tokens_per_micro_batch, device=self.device, only=only)

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
        step: _StepTensors,
        weights: Tensor,
        algorithm: AlgorithmConfig,
        totals: _Totals,
        *,
        first: bool,
    ) -> Tensor:
        """The micro-batch's part of the optimizer step's loss."""
        logprobs, entropy = self.forward(micro)
        response = torch.tensor(micro.response_ids, device=self.device)[micro.response_index]
        weight, advantages = weights[response], step.advantages[response]
        old = logprobs.detach() if step.old_logprobs is None else step.old_logprobs[micro.token_index]
        options = LossOptions(clip_low=algorithm.clip_low, clip_high=algorithm.clip_high)
        tokens = LOSSES[algorithm.loss](
            logprobs, old, advantages, micro.response_index, len(micro.response_ids), options
        )
        loss = tokens.loss
        kl = None
        if step.ref_logprobs is not None:
            kl = KL_ESTIMATORS[algorithm.kl_estimator](logprobs, step.ref_logprobs[micro.token_index])
            loss = loss + algorithm.kl_coef * kl
        if algorithm.entropy_coef:
            loss = loss - algorithm.entropy_coef * entropy
        weighted = (loss * weight).sum()
        totals.add_tokens(
            tokens=torch.ones_like(old),
            loss=weighted,
            pg_loss=(tokens.loss * weight),
            entropy=entropy,
            clipped=tokens.clipped,
            ppo_kl=torch.where(tokens.finite, old - logprobs, 0.0),
            nonfinite=~tokens.finite,
            **({} if kl is None else {"kl": kl}),
        )
        if first:  # before any optimizer step of this rollout has moved the policy
            totals.add_gap(old - step.rollout_logprobs[micro.token_index])
        return weighted

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Named weights as Hugging Face spells them."""
        yield from self.model.state_dict().items()


class _StepTensors:
    """What a step knows per token or per response, on the device."""

    def __init__(self, batch: StepBatch, device: torch.device) -> None:
        self.advantages = torch.tensor(batch.advantages.reshape(-1), dtype=torch.float32, device=device)
        self.old_logprobs = batch.old_logprobs
        self.ref_logprobs = batch.ref_logprobs
        sampled = [lp for group in batch.groups for response in group.responses for lp in response.logprobs]
        self.rollout_logprobs = torch.tensor(sampled, dtype=torch.float32, device=device)


@dataclass
class _Totals:
    """Sums over the micro-batches of an update; read from the device once, at the end."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    gap_max: Tensor | None = None
    grad_norms: list[float] = field(default_factory=list)
    lr: float = 0.0

    def add_tokens(self, **values: Tensor) -> None:
        for name, value in values.items():
            total = value.detach().float().sum()
            self.sums[name] = self.sums[name] + total if name in self.sums else total

    def add_gap(self, gap: Tensor) -> None:
        size = gap.abs()
        self.add_tokens(
            gap_tokens=torch.ones_like(gap),
            gap=size,
            gap_large=size > 0.1,
            gap_k3=torch.expm1(gap.clamp(-20, 20)) - gap,
        )
        largest = size.max() if size.numel() else size.new_zeros(())
        self.gap_max = largest if self.gap_max is None else torch.maximum(self.gap_max, largest)

    def add_optimizer_step(self, grad_norm: float, lr: float) -> None:
        self.grad_norms.append(grad_norm)
        self.lr = lr

    def metrics(self, algorithm: AlgorithmConfig) -> dict[str, float]:
        """Metrics under the names of metrics.py."""
        sums = {name: float(value) for name, value in self.sums.items()}
        finite = [norm for norm in self.grad_norms if np.isfinite(norm)]
        values = {
            "actor/lr": self.lr,
            "actor/skipped_steps": float(len(self.grad_norms) - len(finite)),
        }
        if finite:
            values["actor/grad_norm"] = float(np.mean(finite))
        num_tokens = sums.get("tokens", 0.0)
        if not num_tokens:
            return values
        steps = max(1, len(self.grad_norms))
        values |= {
            "actor/loss": sums["loss"] / steps,
            "actor/pg_loss": sums["pg_loss"] / steps,
            "actor/entropy": sums["entropy"] / num_tokens,
            "actor/pg_clipfrac": sums["clipped"] / num_tokens,
            "actor/ppo_kl": sums["ppo_kl"] / num_tokens,
            "actor/nonfinite_tokens": sums["nonfinite"],
            "rollout/logprob_gap_mean": sums["gap"] / sums["gap_tokens"],
            "rollout/logprob_gap_max": float(self.gap_max) if self.gap_max is not None else 0.0,
            "rollout/logprob_gap_share": sums["gap_large"] / sums["gap_tokens"],
            "rollout/mismatch_k3": sums["gap_k3"] / sums["gap_tokens"],
        }
        if algorithm.kl_coef and "kl" in sums:
            values["actor/kl_loss"] = sums["kl"] / num_tokens
        return values
