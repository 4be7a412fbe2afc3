"""The gradient of an update: equal to the formula on one sequence at a time, however the step is cut.

The reference is transformers' own attention on each prompt + response, plain log-softmax, and the objective written
out token by token, in fp32.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from covey.algorithm.losses import LOSSES
from covey.config.presets import PRESETS
from covey.config.schema import AlgorithmConfig
from covey.models.load import prepare_model
from covey.policy import ForwardLimits, Policy
from covey.types import Group, Prompt, Response, StepBatch

VOCAB, TEMPERATURE, MAX_LENGTH = 61, 0.8, 12
SHAPES = [(4, [3, 12, 5]), (7, [1, 6, 2]), (2, [12, 4, 9])]  # prompt length, response lengths; 12 is truncated
BUDGETS = [20, 40, 10_000]


class CollectGradient:
    """Stands for the optimizer: keeps the gradient and leaves the weights alone."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.gradient = torch.zeros(0)

    def step(self, lr: float) -> float:
        del lr
        self.gradient = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])
        return self.gradient.norm().item()


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
    )


def step_batch(model: Qwen2ForCausalLM) -> StepBatch:
    """A step whose old, reference and rollout log-probabilities all lie near the policy's."""
    generator = torch.Generator().manual_seed(4)

    def ids(n: int) -> list[int]:
        return torch.randint(0, VOCAB, (n,), generator=generator).tolist()

    groups = [
        Group(
            Prompt(p, ids(num_prompt), ""),
            [Response(ids(n), [0.0] * n, finish_reason="length" if n == MAX_LENGTH else "stop") for n in lengths],
        )
        for p, (num_prompt, lengths) in enumerate(SHAPES)
    ]
    near = torch.cat([logprobs.detach() for logprobs, _ in scores_one_by_one(model, groups)])

    def noisy(scale: float) -> Tensor:
        return near + scale * torch.randn(len(near), generator=generator)

    rollout = iter(noisy(0.1).tolist())
    for group in groups:
        for response in group.responses:
            response.logprobs = [next(rollout) for _ in response.token_ids]
    advantages = torch.randn(3, 3, generator=generator).double().numpy()
    return StepBatch(groups, np.zeros((3, 3)), advantages, noisy(0.15), noisy(0.2))


def scores_one_by_one(model: Qwen2ForCausalLM, groups: list[Group]) -> list[tuple[Tensor, Tensor]]:
    """(log-probabilities, entropies) of each response."""
    scores = []
    for group in groups:
        for response in group.responses:
            ids = torch.tensor([group.prompt.input_ids + response.token_ids])
            first = len(group.prompt.input_ids)
            logp = (model(ids, use_cache=False).logits[0, first - 1 : -1] / TEMPERATURE).log_softmax(-1)
            scores.append((logp.gather(1, ids[0, first:, None])[:, 0], -(logp.exp() * logp).sum(-1)))
    return scores


def gradient_of_update(model: Qwen2ForCausalLM, algorithm: dict[str, Any], *, max_tokens: int) -> Tensor:
    batch = step_batch(model)
    model = copy.deepcopy(model)
    prepare_model(model)
    policy = Policy(
        model,
        device=torch.device("cpu"),
        temperature=TEMPERATURE,
        limits=ForwardLimits(max_tokens_per_micro_batch=max_tokens, logits_chunk_bytes=4 * VOCAB * 5),
    )
    optimizer = CollectGradient(model)
    policy.update(
        batch,
        AlgorithmConfig.model_validate(algorithm),
        optimizer=optimizer,
        lr=lambda _: 0.0,
        max_response_length=MAX_LENGTH,
    )
    return optimizer.gradient


def close(left: Tensor, right: Tensor) -> bool:
    return bool((left - right).norm() <= 1e-5 * right.norm())


@pytest.mark.parametrize("budget", BUDGETS)
def test_gradient_equals_the_formula_on_one_sequence_at_a_time(model: Qwen2ForCausalLM, budget: int) -> None:
    """Clip-higher, truncated responses masked, k3 with importance weight, entropy bonus, token mean."""
    batch, reference = step_batch(model), copy.deepcopy(model)
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    total, tokens, start = torch.zeros(()), 0, 0
    responses = [response for group in batch.groups for response in group.responses]
    scores = scores_one_by_one(reference, batch.groups)
    for response, advantage, (logprobs, entropy) in zip(responses, batch.advantages.ravel(), scores, strict=True):
        rows = slice(start, start + len(response.token_ids))
        start = rows.stop
        if response.finish_reason == "length":
            continue
        tokens += len(response.token_ids)
        ratio = (logprobs - batch.old_logprobs[rows]).exp()
        gap = batch.ref_logprobs[rows] - logprobs
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.15) * advantage)
        total = total + (-surrogate + 0.1 * ratio * (gap.exp() - gap - 1) - 0.02 * entropy).sum()
    (total / tokens).backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None])
    algorithm = {
        "preset": "dapo",
        "clip_low": 0.1,
        "clip_high": 0.15,
        "mask_truncated": True,
        "kl_coef": 0.1,
        "kl_importance_weighted": True,
        "entropy_coef": 0.02,
    }
    assert close(gradient_of_update(model, algorithm, max_tokens=budget), expected)


OPTIONS = {
    "kl_coef": 0.1,
    "entropy_coef": 0.02,
    "mask_truncated": True,
    "top_entropy_share": 0.6,
    "rollout_correction": "sequence_truncate",
    "off_policy_max_kl": 0.02,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_cutting_the_step_does_not_change_the_gradient(model: Qwen2ForCausalLM, preset: str) -> None:
    whole, *parts = (
        gradient_of_update(model, {"preset": preset, **OPTIONS}, max_tokens=budget) for budget in reversed(BUDGETS)
    )
    assert whole.norm() > 0
    assert all(close(part, whole) for part in parts)


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_to_learn_from_gives_a_zero_gradient(model: Qwen2ForCausalLM, loss: str) -> None:
    """Advantages of equal rewards, and no other term."""
    batch = step_batch(model)
    batch.advantages[:] = 0.0
    batch.ref_logprobs = None
    copied = copy.deepcopy(model)
    prepare_model(copied)
    policy = Policy(copied, device=torch.device("cpu"), temperature=TEMPERATURE, limits=ForwardLimits(10_000, 10_000))
    optimizer = CollectGradient(copied)
    algorithm = AlgorithmConfig(loss=loss)
    policy.update(batch, algorithm, optimizer=optimizer, lr=lambda _: 0.0, max_response_length=MAX_LENGTH)
    assert not optimizer.gradient.any()
