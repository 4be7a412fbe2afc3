"""The memory estimate against the real code on tensors without numbers, and against numbers worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from covey.config.schema import Config
from covey.distributed.mesh import Mesh
from covey.memory import memory_per_rank, micro_batch_tokens, num_micro_batches, peak_bytes, phase_bytes

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "memory_model.py"


def _config(**sections: Any) -> Config:
    data: dict[str, Any] = {
        "model": {"path": "none"},
        "data": {"train": "none", "max_prompt_length": 100},
        "rollout": {"num_samples": 4, "max_response_length": 51},
        "reward": {"functions": ["math"]},
        "train": {"batch_size": 8, "max_tokens_per_micro_batch": 600},
        "output_dir": "none",
    }
    for name, keys in sections.items():
        data[name] = data.get(name, {}) | keys
    return Config.model_validate(data)


def _model() -> Any:
    config = Qwen2Config(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.slow
def test_small_models_are_within_the_bounds_of_the_benchmark() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--small", "tokens"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("tiny on") == 6


def test_a_rank_holds_its_share_of_weights_moments_and_reduced_gradients() -> None:
    model = _model()
    count = sum(p.numel() for p in model.parameters())
    memory = memory_per_rank(_config(), model, Mesh(dp_shard=2, tp=2), torch.bfloat16)
    assert [memory[n] for n in ("weights", "AdamW moments", "gradients")] == [count, 2 * count, count]


def test_unreduced_gradients_are_whole_unless_every_micro_batch_is_reduced() -> None:
    """8 groups of 300 tokens, two to a micro-batch of 600, on two ranks: two micro-batches each."""
    model, mesh = _model(), Mesh(dp_shard=2)
    count = sum(p.numel() for p in model.parameters())
    piles = memory_per_rank(_config(), model, mesh, torch.bfloat16)
    pieces = memory_per_rank(_config(parallel={"reduce_every_micro_batch": True}), model, mesh, torch.bfloat16)
    assert num_micro_batches(_config(), mesh) == 2
    assert piles["gradients not reduced yet"] == 4 * count
    assert pieces["gradients not reduced yet"] == 2 * count
    one = _config(train={"max_tokens_per_micro_batch": 1200})
    assert "gradients not reduced yet" not in memory_per_rank(one, model, mesh, torch.bfloat16)


def test_micro_batches_by_hand() -> None:
    assert micro_batch_tokens(_config()) == 600
    # a group of 100 + 4 x 50 does not fit in 220 tokens: rows of two responses, one to a micro-batch
    assert num_micro_batches(_config(train={"max_tokens_per_micro_batch": 220}), Mesh()) == 16
    # a prompt with one response is longer than the budget and comes all the same
    tight = _config(train={"max_tokens_per_micro_batch": 120})
    assert (micro_batch_tokens(tight), num_micro_batches(tight, Mesh())) == (150, 32)


def test_the_peak_is_that_of_the_largest_phase() -> None:
    memory = {"weights": 1, "gradients": 10, "activations": 30, "work of backward": 4, "KV cache (at most)": 20}
    assert phase_bytes(memory) == {"rollout": 21, "gradients": 35, "optimizer": 11}
    assert peak_bytes(memory) == 35


def test_a_pipelines_estimate_is_that_of_its_fullest_stage() -> None:
    model = _model()
    last = memory_per_rank(_config(), model, Mesh(pp=2), torch.bfloat16)
    layers = sum(p.numel() for layer in model.model.layers[2:] for p in layer.parameters())
    assert last["weights"] in (4 * (layers + 64000), 4 * (layers + 64000 + 64))  # with the embedding, or norm and head
