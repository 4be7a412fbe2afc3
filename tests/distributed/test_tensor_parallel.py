"""Cutting every matrix over ranks changes no number: gradient, log-probabilities, weights after steps, rollouts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.distributed import cases
from tests.distributed.harness import run

from covey.distributed import mesh as meshes
from covey.models.load import prepare_model
from covey.rollout.engine import Sampling
from covey.rollout.native import NativeEngine
from covey.types import Prompt


@functools.cache
def _alone(family: str) -> dict[str, Any]:
    return run(1, cases.gradient, family, {}, {"loss": "grpo"}, {})[0]


@pytest.mark.parametrize("family", cases.FAMILIES)
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])
def test_gradient_over_two_ranks_is_that_of_one(family: str, sequence: bool) -> None:
    expected = _alone(family)
    size = sum(float(g.double().square().sum()) for g in expected["gradients"].values()) ** 0.5
    for found in run(2, cases.gradient, family, {"tp": 2}, {"loss": "grpo"}, {"sequence_parallel": sequence}):
        assert cases.relative(found["gradients"], expected["gradients"]) < 1e-5
        assert found["norm"] == pytest.approx(size, rel=1e-5)
        torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=0, atol=3e-6)
        for name in ("actor/loss", "actor/entropy", "actor/kl_loss"):
            assert found["stats"][name] == pytest.approx(expected["stats"][name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_tensor_and_data_parallel_together(family: str) -> None:
    found = run(4, cases.gradient, family, {"tp": 2, "dp_shard": 2}, {"loss": "grpo"}, {"sequence_parallel": True})
    for one in found:
        assert cases.relative(one["gradients"], _alone(family)["gradients"]) < 1e-5


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])
def test_optimizer_steps_end_in_the_same_weights(sequence: bool) -> None:
    (expected,) = run(1, cases.two_steps, "qwen3", {})
    found = run(2, cases.two_steps, "qwen3", {"tp": 2}, {"sequence_parallel": sequence})
    assert found[0]["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert cases.relative(found[0]["weights"], expected["weights"]) < 1e-5
    for name in expected["weights"]:
        assert torch.equal(found[0]["weights"][name], found[1]["weights"][name]), name


def _rollout(family: str, sizes: dict[str, Any]) -> list[list[list[int]]]:
    policy = cases.make_policy(family, sizes, sequence_parallel=True)
    with policy.gathered():
        engine = NativeEngine(
            policy.model,
            stop_token_ids=[3],
            decode=str,
            max_num_seqs=8,
            kv_cache_bytes=2**24,
            tp_size=policy.mesh.tp,
        )
        prompts = [Prompt(i, [5 + i, 7, 11, 13 + i][: 2 + i], "") for i in range(3)]
        groups = engine.generate(prompts, Sampling(num_samples=4, max_response_length=10, seed=3))
    meshes.stop()
    return [[r.token_ids for r in group.responses] for group in groups]


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_rollout_over_two_ranks_samples_the_tokens_of_one(family: str) -> None:
    (expected,) = run(1, _rollout, family, {})
    for found in run(2, _rollout, family, {"tp": 2}):
        assert found == expected


def _refused(kv_heads: int) -> str:
    m = meshes.start(communication="gloo", device=cases.CPU, tp=2)
    network = cases.model("llama", kv_heads=kv_heads)
    prepare_model(network)
    with pytest.raises(ValueError) as caught:
        cases.policy_of(network, m)
    return str(caught.value)


def test_heads_that_cannot_be_shared_out_are_refused_with_the_numbers() -> None:
    for message in run(2, _refused, 1):
        assert "parallel.tp=2" in message
        assert "num_key_value_heads=1" in message
