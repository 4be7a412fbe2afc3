"""Sharded data parallelism computes the gradient of one process: no rank, packing or summing shows in it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.distributed import cases
from tests.distributed.harness import run
from torch.distributed.fsdp import FSDPModule

from covey.config.schema import AlgorithmConfig
from covey.distributed import mesh as meshes
from covey.policy import Policy


@functools.cache
def _alone(family: str, loss: str = "grpo") -> dict[str, Any]:
    return run(1, cases.gradient, family, {}, {"loss": loss}, {})[0]


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_gradient_of_two_ranks_is_that_of_one_process(family: str) -> None:
    expected = _alone(family)
    for found in run(2, cases.gradient, family, {}, {"loss": "grpo"}, {}):
        assert cases.relative(found["gradients"], expected["gradients"]) < 1e-5
        torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=0, atol=2e-6)
        for name, value in expected["stats"].items():
            assert found["stats"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        assert found["stats"]["update/token_imbalance"] < 0.5


def test_replicas_of_sharded_weights_sum_their_gradients() -> None:
    found = run(4, cases.gradient, "qwen2", {"dp_replicate": 2}, {"loss": "grpo"}, {})
    assert cases.relative(found[3]["gradients"], _alone("qwen2")["gradients"]) < 1e-5


@pytest.mark.parametrize(("world", "sizes"), [(2, {}), (4, {"dp_replicate": 2}), (2, {"pp": 2})])
def test_reducing_after_every_micro_batch_gives_the_same_gradient(world: int, sizes: dict[str, int]) -> None:
    ranks = run(world, _gradient_and_whole_gradients, sizes)
    together = {name: gradient for found, _ in ranks for name, gradient in found.items()}
    assert cases.relative(together, _alone("qwen2")["gradients"]) < 1e-5
    assert all(micros > 1 and not kept for _, (micros, kept) in ranks)


def _gradient_and_whole_gradients(sizes: dict[str, int]) -> tuple[dict[str, torch.Tensor], tuple[int, int]]:
    """The gradient, the number of micro-batches, and how many unsharded gradients lay there between two of them."""
    policy = cases.make_policy("qwen2", sizes, max_tokens=30, reduce_every_micro_batch=True)
    recorder = cases.Recorder(policy)
    micros, kept = 0, 0

    def look(module: Any, args: Any) -> None:
        nonlocal micros, kept
        micros += 1
        units = [m for m in policy.parallel._scoring.modules() if isinstance(m, FSDPModule)]
        groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
        kept += sum(p.unsharded_accumulated_grad is not None for group in groups for p in group.fsdp_params)

    policy.parallel._scoring.register_forward_pre_hook(look)
    config = AlgorithmConfig(kl_coef=0.1, entropy_coef=0.01, loss="grpo")
    policy.update(cases.batch(), config, optimizer=recorder, lr=lambda i: 1e-3, max_response_length=32)
    meshes.stop()
    return recorder.gradients, (micros, kept)


def test_sequence_losses_stay_whole_on_a_rank() -> None:
    found = run(2, cases.gradient, "qwen3", {}, {"loss": "gspo"}, {})
    assert cases.relative(found[0]["gradients"], _alone("qwen3", "gspo")["gradients"]) < 1e-5


def test_more_ranks_than_responses_leave_the_gradient_alone() -> None:
    found = run(3, _gradient_of_one_group, {})
    expected = run(1, _gradient_of_one_group, {})
    assert cases.relative(found[2], expected[0]) < 1e-5


def _gradient_of_one_group(sizes: dict[str, Any]) -> dict[str, torch.Tensor]:
    policy = cases.make_policy("llama", sizes)
    recorder = cases.Recorder(policy)
    step = cases.batch(num_prompts=1, num_samples=2)
    policy.update(step, AlgorithmConfig(), optimizer=recorder, lr=lambda i: 1e-3, max_response_length=32)
    meshes.stop()
    return recorder.gradients


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_optimizer_steps_end_in_the_same_weights(family: str) -> None:
    (expected,) = run(1, cases.two_steps, family, {})
    found = run(2, cases.two_steps, family, {})
    for one in found:
        assert one["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert cases.relative(one["weights"], expected["weights"]) < 1e-5
    for name in expected["weights"]:
        assert torch.equal(found[0]["weights"][name], found[1]["weights"][name])


def _gathered_forward(sizes: dict[str, Any]) -> list[torch.Tensor]:
    """Ranks run different numbers of forwards inside `gathered`, then train together."""
    policy = cases.make_policy("qwen2", sizes)
    step = cases.batch()
    before = policy.logprobs(step.groups)
    logits = torch.empty(0)
    with policy.gathered(), torch.no_grad():
        for _ in range(1 + 3 * policy.mesh.rank):
            hidden = policy.model.base_model(
                input_ids=torch.arange(5)[None], position_ids=torch.arange(5)[None], plan=_Causal(), use_cache=False
            ).last_hidden_state
            logits = policy.model.get_output_embeddings()(hidden)
    after = policy.logprobs(step.groups)
    meshes.stop()
    return [before, after, logits]


class _Causal:
    """Plain causal attention over one sequence."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> Any:
        repeats = query.shape[0] // key.shape[0]
        scores = query @ key.repeat_interleave(repeats, 0).transpose(1, 2) * scale
        mask = torch.ones(scores.shape[-2:]).triu(1).bool()
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        return (weights @ value.repeat_interleave(repeats, 0)).transpose(0, 1)


def test_gathered_weights_let_ranks_run_apart() -> None:
    expected = run(1, _gathered_forward, {})[0]
    for found in run(2, _gathered_forward, {}):
        torch.testing.assert_close(found[2], expected[2], rtol=0, atol=1e-5)
        assert torch.equal(found[0], found[1])


def _bf16(sizes: dict[str, Any]) -> dict[str, Any]:
    policy = cases.make_policy("qwen3", sizes, compute_dtype=torch.bfloat16)
    dtypes = {p.dtype for p in policy.model.parameters()}
    with policy.gathered():
        gathered = {p.dtype for p in policy.model.parameters()}
    recorder = _unclipped_update(policy)
    meshes.stop()
    return {"held": dtypes, "gathered": gathered, "gradients": recorder.gradients}


def test_bf16_compute_keeps_fp32_masters_and_reduced_gradients() -> None:
    found = run(2, _bf16, {})[0]
    assert found["held"] == {torch.float32}
    assert found["gathered"] == {torch.bfloat16}
    assert {g.dtype for g in found["gradients"].values()} == {torch.float32}
    (alone,) = run(1, _bf16_alone)
    assert cases.relative(found["gradients"], alone) < 0.05


def _bf16_alone() -> dict[str, torch.Tensor]:
    policy = cases.make_policy("qwen3", {})
    policy.model.bfloat16()
    return {name: g.float() for name, g in _unclipped_update(policy).gradients.items()}


def _unclipped_update(policy: Policy) -> cases.Recorder:
    """Ratios of exactly 1: rounding must not decide which tokens are clipped."""
    step, recorder = cases.batch(), cases.Recorder(policy)
    step.old_logprobs = None
    policy.update(step, AlgorithmConfig(), optimizer=recorder, lr=lambda i: 1e-3, max_response_length=32)
    return recorder
