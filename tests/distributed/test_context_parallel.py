"""Cutting the tokens of a packed row over ranks changes no number, whatever the shared prompts and the heads."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.distributed import cases
from tests.distributed.harness import run

from covey.distributed import mesh as meshes
from covey.models.load import prepare_model


@functools.cache
def _alone(family: str, loss: str = "grpo") -> dict[str, Any]:
    return run(1, cases.gradient, family, {}, {"loss": loss}, {})[0]


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_gradient_over_two_ranks_is_that_of_one(family: str) -> None:
    expected = _alone(family)
    for found in run(2, cases.gradient, family, {"cp": 2}, {"loss": "grpo"}, {}):
        assert cases.relative(found["gradients"], expected["gradients"]) < 1e-5
        torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=0, atol=3e-6)
        for name, value in expected["stats"].items():
            assert found["stats"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"cp": 2, "dp_shard": 2}, {}),
        ({"cp": 4}, {}),  # more ranks than key/value heads
        ({"cp": 2, "tp": 2}, {"sequence_parallel": True}),
    ],
    ids=["cp x dp", "cp over kv heads", "cp x tp + sp"],
)
def test_with_other_axes(sizes: dict[str, int], options: dict[str, Any]) -> None:
    for found in run(4, cases.gradient, "qwen3", sizes, {"loss": "grpo"}, options):
        assert cases.relative(found["gradients"], _alone("qwen3")["gradients"]) < 1e-5


def test_a_sequence_loss_sees_responses_that_ranks_share() -> None:
    found = run(2, cases.gradient, "qwen3", {"cp": 2}, {"loss": "gspo"}, {})
    assert cases.relative(found[0]["gradients"], _alone("qwen3", "gspo")["gradients"]) < 1e-5


def test_optimizer_steps_end_in_the_same_weights() -> None:
    (expected,) = run(1, cases.two_steps, "qwen2", {})
    found = run(2, cases.two_steps, "qwen2", {"cp": 2})
    assert found[0]["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert cases.relative(found[0]["weights"], expected["weights"]) < 1e-5


def _refused() -> str:
    m = meshes.start(communication="gloo", device=cases.CPU, cp=3)
    network = cases.model("llama")
    prepare_model(network)
    with pytest.raises(ValueError) as caught:
        cases.policy_of(network, m)
    return str(caught.value)


def test_heads_that_ranks_do_not_divide_are_refused_with_the_numbers() -> None:
    for message in run(3, _refused):
        assert "cp=3" in message
        assert "num_attention_heads=4" in message
