"""Seconds of a step: numbers worked out by hand, and how layouts and devices change them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from covey.config.schema import Config
from covey.distributed.mesh import Mesh
from covey.tools.time_model import HARDWARE, Hardware, Lengths, concurrent_sequences, forward_flops, step_seconds
from covey.tools.traffic import Shape, Work

SHAPE = Shape(
    width=8,
    hidden=16,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=2,
    vocab=50,
    layer_params=1000,
    table_params=400,
    tied=False,
)
# 1 GFLOPS and 1 MB/s without latency: everything is bound by arithmetic or memory
SLOW = Hardware("slow", 1e-3, 1e-3, 1e9, 1e9, compute_share=1.0, decode_share=1.0, launch_s=0.0, latency_s=0.0)
LENGTHS = Lengths(prompt=10, response=6)
WORK = Work(micro_batches=4, tokens=100, targets=24)


def _config(**sections: Any) -> Config:
    data: dict[str, Any] = {
        "model": {"path": "none"},
        "data": {"train": "none"},
        "rollout": {"num_samples": 2, "max_response_length": 6},
        "reward": {"functions": ["math"]},
        "train": {"batch_size": 4},
        "algorithm": {"kl_coef": 0.0},
        "output_dir": "none",
    }
    for name, keys in sections.items():
        data[name] = data.get(name, {}) | keys
    return Config.model_validate(data)


def _seconds(config: Config, mesh: Mesh | None = None, hardware: Hardware = SLOW) -> dict[str, float]:
    return step_seconds(config, SHAPE, mesh or Mesh(), hardware, LENGTHS, WORK, size=2)


# A prompt of 10 and two responses of 5 run tokens; pairs 50 + 2 x (60 + 18); the head for 12 tokens.
FORWARD = 4 * (2 * 1000 * 20 + 4 * 8 * 206) + 2 * 400 * 12


def test_a_groups_forward_by_hand() -> None:
    assert forward_flops(SHAPE, LENGTHS, 2) == FORWARD


def test_an_update_is_three_forwards_and_four_with_checkpointing() -> None:
    assert _seconds(_config())["update"] == pytest.approx(3 * 4 * FORWARD / 1e9)
    assert _seconds(_config(model={"gradient_checkpointing": True}))["update"] == pytest.approx(16 * FORWARD / 1e9)


def test_old_and_reference_logprobs_are_one_forward_each() -> None:
    name = "old, reference and teacher logprobs"
    assert _seconds(_config())[name] == 0
    assert _seconds(_config(algorithm={"kl_coef": 0.1, "epochs": 2}))[name] == pytest.approx(8 * FORWARD / 1e9)


def test_a_decoded_token_reads_weights_and_cache() -> None:
    """8 responses at once: 6 tokens, each 4400 weights in 2 bytes and the cache of 8 x (5 + 3) tokens of 64 bytes."""
    prefill = 4 * 10 * 2 * 4400 / 1e9
    assert _seconds(_config())["rollout"] == pytest.approx(prefill + 6 * (8800 + 8 * 64 * 8) / 1e6)


def test_the_cache_bounds_what_is_decoded_at_once() -> None:
    assert concurrent_sequences(_config(), SHAPE, Mesh(), LENGTHS, 2) == 8
    # a group needs 10 + 2 x 6 tokens of 64 bytes: room for two of them
    small = _config(rollout={"kv_cache_bytes": 2 * 22 * 64})
    assert concurrent_sequences(small, SHAPE, Mesh(), LENGTHS, 2) == 4


def test_a_pipeline_waits_at_its_ends() -> None:
    plain, staged = (_seconds(_config(), mesh)["update"] for mesh in (Mesh(dp_shard=2), Mesh(pp=2)))
    assert staged == pytest.approx(plain * 1.25)  # one of four micro-batches


def test_slower_links_cost_time_where_ranks_exchange_inside_layers() -> None:
    slow = replace(SLOW, link_gbs=1e-6)
    assert _seconds(_config(), Mesh(tp=2), slow)["update"] > 2 * _seconds(_config(), Mesh(tp=2))["update"]


def test_known_devices_have_peaks() -> None:
    assert all(h.peak_tflops > 100 and h.memory_gbs > 1000 and h.link_gbs > 0 for h in HARDWARE.values())
