"""Steps with bad numbers or nothing to learn from: the loss stays finite, the rest of the step is learned from, and
what was left out is counted."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed import cases
from torch import Tensor

from covey.algorithm.losses import LOSSES
from covey.config.schema import AlgorithmConfig, DistillationConfig
from covey.distributed.mesh import Mesh
from covey.optim import Optimizer
from covey.types import Group, Response, StepBatch

BAD = [math.nan, math.inf, -math.inf]
TEACHER = DistillationConfig(teacher="unused", coef=0.5, discount=0.9)


def update(
    batch: StepBatch, distillation: DistillationConfig | None = None, **algorithm: Any
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """(metrics, whole gradient) of one optimizer step."""
    policy = cases.policy_of(cases.model("qwen2"), Mesh())
    recorder = cases.Recorder(policy)
    stats = policy.update(
        batch,
        AlgorithmConfig.model_validate(algorithm),
        optimizer=recorder,
        lr=lambda i: 0.0,
        max_response_length=32,
        distillation=distillation,
    )
    return stats.values, recorder.gradients


def with_teacher() -> StepBatch:
    batch = cases.batch()
    assert batch.old_logprobs is not None
    batch.teacher_logprobs = batch.old_logprobs + torch.linspace(-1.0, 1.0, len(batch.old_logprobs))
    return batch


def finite(values: dict[str, float], gradients: dict[str, Tensor]) -> bool:
    return all(map(math.isfinite, values.values())) and all(bool(g.isfinite().all()) for g in gradients.values())


def size(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bad", BAD)
def test_old_logprobs_that_are_not_finite_are_left_out_and_counted(loss: str, bad: float) -> None:
    batch = cases.batch()
    assert batch.old_logprobs is not None
    batch.old_logprobs[[3, 20]] = bad
    values, gradients = update(batch, loss=loss, kl_coef=0.1, entropy_coef=0.01)
    assert finite(values, gradients) and size(gradients) > 0
    assert values["actor/nonfinite_tokens"] == 2


@pytest.mark.parametrize("name", ["ref_logprobs", "teacher_logprobs"])
@pytest.mark.parametrize("bad", BAD)
def test_a_token_that_a_scoring_model_cannot_score_loses_that_term_alone(name: str, bad: float) -> None:
    """As if that model agreed with the policy that started the update (teacher), or had no opinion (reference)."""
    batch, agreeing = with_teacher(), with_teacher()
    getattr(batch, name)[7] = bad
    values, gradients = update(batch, TEACHER, kl_coef=0.1)
    assert finite(values, gradients)
    if name == "teacher_logprobs":
        assert agreeing.teacher_logprobs is not None and agreeing.old_logprobs is not None
        agreeing.teacher_logprobs[7] = agreeing.old_logprobs[7]
        _, expected = update(agreeing, TEACHER, kl_coef=0.1)
        assert cases.relative(gradients, expected) < 1e-6


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_mask", "geometric_mask"])
def test_rollout_logprobs_that_are_not_finite_do_not_spread(correction: str) -> None:
    batch = cases.batch()
    batch.groups[0].responses[0].logprobs[0] = -math.inf
    values, gradients = update(batch, rollout_correction=correction)
    assert all(bool(g.isfinite().all()) for g in gradients.values()) and math.isfinite(values["actor/loss"])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant", "sequence_sum"])
def test_an_empty_response_is_a_response_without_tokens(aggregation: str) -> None:
    """It has no gradient. Where the denominator counts responses, it is one of them."""
    batch = cases.batch()
    without = dataclasses.replace(batch, groups=[Group(g.prompt, list(g.responses)) for g in batch.groups])
    lengths = [len(r.token_ids) for g in batch.groups for r in g.responses]
    index, start = 4, sum(lengths[:4])  # group 1, response 1
    keep = torch.ones(sum(lengths), dtype=torch.bool)
    keep[start : start + lengths[index]] = False
    empty = dataclasses.replace(without, groups=[Group(g.prompt, list(g.responses)) for g in batch.groups])
    empty.groups[1].responses[1] = Response([], [])
    del without.groups[1].responses[1]
    flat = np.delete(batch.advantages.ravel(), index)
    for changed in (empty, without):
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None
        changed.old_logprobs, changed.ref_logprobs = batch.old_logprobs[keep], batch.ref_logprobs[keep]
    without.advantages = flat  # one a response, in order; the groups have different sizes
    values, gradients = update(empty, aggregation=aggregation)
    _, expected = update(without, aggregation=aggregation)
    counts_responses = 1.0 if aggregation == "token_mean" else 11 / 12
    expected = {name: g * counts_responses for name, g in expected.items()}
    assert finite(values, gradients) and size(gradients) > 0
    assert cases.relative(gradients, expected) < 1e-5


def test_a_step_of_truncated_responses_alone_changes_nothing_when_they_are_masked() -> None:
    batch = cases.batch()
    for group in batch.groups:
        for response in group.responses:
            response.finish_reason = "length"
    values, gradients = update(batch, mask_truncated=True, kl_coef=0.1, entropy_coef=0.01)
    assert finite(values, gradients)
    assert values["actor/loss"] == 0.0 and size(gradients) == 0.0


def test_groups_of_equal_rewards_leave_only_the_other_terms() -> None:
    batch = cases.batch()
    batch.advantages[:] = 0.0
    values, gradients = update(batch)
    assert finite(values, gradients) and size(gradients) == 0.0
    values, gradients = update(batch, kl_coef=0.1)
    assert finite(values, gradients) and size(gradients) > 0.0


def test_weights_that_are_not_finite_skip_the_optimizer_step() -> None:
    """Every token is counted as left out, the loss is 0, and no weight moves."""
    network = cases.model("qwen2")
    with torch.no_grad():
        network.model.norm.weight[0] = math.nan
    policy = cases.policy_of(network, Mesh())
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    optimizer = Optimizer(network.parameters(), cases.train_config())
    batch = cases.batch()
    stats = policy.update(batch, AlgorithmConfig(), optimizer=optimizer, lr=lambda i: 1e-3, max_response_length=32)
    assert stats.values["actor/skipped_steps"] == 1
    assert stats.values["actor/loss"] == 0.0
    assert batch.old_logprobs is not None
    assert stats.values["actor/nonfinite_tokens"] == len(batch.old_logprobs)
    for name, p in network.named_parameters():
        assert torch.equal(p.nan_to_num(), before[name].nan_to_num())
