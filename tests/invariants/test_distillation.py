"""The gradient with a teacher: equal to the formula on one sequence at a time, however the step is cut."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.invariants.test_update import (
    BUDGETS,
    MAX_LENGTH,
    TEMPERATURE,
    VOCAB,
    CollectGradient,
    close,
    model,  # noqa: F401  # a fixture
    scores_one_by_one,
    step_batch,
)
from torch import Tensor
from transformers import Qwen2ForCausalLM

from covey.config.schema import AlgorithmConfig, DistillationConfig
from covey.models.load import prepare_model
from covey.policy import ForwardLimits, Policy
from covey.types import StepBatch

COEF, DISCOUNT = 0.7, 0.6


def batch_with_teacher(network: Qwen2ForCausalLM, *, alone: bool) -> StepBatch:
    batch = step_batch(network)
    assert batch.old_logprobs is not None
    noise = torch.randn(len(batch.old_logprobs), generator=torch.Generator().manual_seed(9))
    batch.teacher_logprobs = batch.old_logprobs + noise
    batch.ref_logprobs = None
    if alone:
        batch.advantages[:] = 0.0
    return batch


def gradient(network: Qwen2ForCausalLM, batch: StepBatch, algorithm: dict, *, max_tokens: int) -> Tensor:
    network = copy.deepcopy(network)
    prepare_model(network)
    limits = ForwardLimits(max_tokens_per_micro_batch=max_tokens, logits_chunk_bytes=4 * VOCAB * 5)
    policy = Policy(network, device=torch.device("cpu"), temperature=TEMPERATURE, limits=limits)
    optimizer = CollectGradient(network)
    policy.update(
        batch,
        AlgorithmConfig.model_validate(algorithm),
        optimizer=optimizer,
        lr=lambda _: 0.0,
        max_response_length=MAX_LENGTH,
        distillation=DistillationConfig(teacher="unused", coef=COEF, discount=DISCOUNT),
    )
    return optimizer.gradient


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("alone", [True, False])
def test_gradient_equals_the_formula_on_one_sequence_at_a_time(
    model: Qwen2ForCausalLM,  # noqa: F811
    budget: int,
    alone: bool,
) -> None:
    batch, reference = batch_with_teacher(model, alone=alone), copy.deepcopy(model)
    assert batch.old_logprobs is not None and batch.teacher_logprobs is not None
    total, start = torch.zeros(()), 0
    responses = [response for group in batch.groups for response in group.responses]
    scores = scores_one_by_one(reference, batch.groups)
    for response, advantage, (logprobs, _) in zip(responses, batch.advantages.ravel(), scores, strict=True):
        rows = slice(start, start + len(response.token_ids))
        start = rows.stop
        later, advantages = 0.0, []
        for gap in reversed((batch.teacher_logprobs[rows] - batch.old_logprobs[rows]).tolist()):
            later = gap + DISCOUNT * later
            advantages.insert(0, float(advantage) + COEF * later)
        a = torch.tensor(advantages)
        ratio = (logprobs - batch.old_logprobs[rows]).exp()
        total = total - torch.minimum(ratio * a, ratio.clamp(0.9, 1.15) * a).sum()
    (total / start).backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None])
    algorithm = {"clip_low": 0.1, "clip_high": 0.15}
    assert close(gradient(model, batch, algorithm, max_tokens=budget), expected)


@pytest.mark.parametrize("loss", ["gspo_token", "cispo", "sapo", "reinforce", "vespo"])
def test_cutting_the_step_does_not_change_the_gradient(
    model: Qwen2ForCausalLM,  # noqa: F811
    loss: str,
) -> None:
    algorithm = {"loss": loss, "top_entropy_share": 0.6, "rollout_correction": "sequence_truncate"}
    batch = batch_with_teacher(model, alone=False)
    whole, *parts = (gradient(model, batch, algorithm, max_tokens=budget) for budget in reversed(BUDGETS))
    assert whole.norm() > 0
    assert all(close(part, whole) for part in parts)
