"""Bytes sent by axis, worked out by hand; benchmarks/communication.py counts them in real runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from covey.config.schema import Config
from covey.distributed.mesh import Mesh
from covey.tools.traffic import Shape, Work, rollout_traffic, update_traffic

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
WORK = Work(micro_batches=3, tokens=300, targets=100)


def _config(**parallel: Any) -> Config:
    checkpointing = parallel.pop("checkpointing", False)
    return Config.model_validate(
        {
            "model": {"path": "none", "gradient_checkpointing": checkpointing},
            "data": {"train": "none"},
            "reward": {"functions": ["math"]},
            "parallel": parallel,
            "output_dir": "none",
        }
    )


def test_sharded_weights() -> None:
    mesh = Mesh(dp_shard=4)
    found = update_traffic(_config(), SHAPE, mesh, WORK, size=2)
    # three micro-batches gather 4 layers twice and the tables once, in 2 bytes; 4800 gradients go once, in 4 bytes
    assert found == {"gather weights": 3 * 2 * (8000 + 800) * 0.75, "reduce gradients": 4 * 4800 * 0.75}
    every = update_traffic(_config(reduce_every_micro_batch=True), SHAPE, mesh, WORK, size=2)
    assert every["reduce gradients"] == 3 * found["reduce gradients"]
    assert rollout_traffic(SHAPE, mesh, size=2) == 2 * 4800 * 0.75


def test_copies_exchange_their_pieces() -> None:
    found = update_traffic(_config(), SHAPE, Mesh(dp_replicate=2, dp_shard=4), WORK, size=2)
    assert found["sum replicas"] == 2 * 4 * 1200 * 0.5


def test_cut_matrices() -> None:
    found = update_traffic(_config(), SHAPE, Mesh(tp=2), WORK, size=2)
    hidden = 300 * 8 * 2
    assert found["tensor parallel"] == (4 * 4 + 2) * hidden * 2 * 0.5 + 12 * 100
    again = update_traffic(_config(checkpointing=True), SHAPE, Mesh(tp=2), WORK, size=2)
    assert again["tensor parallel"] - found["tensor parallel"] == 4 * hidden


def test_cut_tokens_repeat_keys_that_ranks_do_not_divide() -> None:
    two, four = (update_traffic(_config(), SHAPE, Mesh(cp=cp), WORK, size=2)["context parallel"] for cp in (2, 4))
    assert two == (2 * 4 * 12 * 2 * 150 * 2 + 16 * 100) * 0.5
    assert four == (2 * 4 * 16 * 2 * 75 * 2 + 16 * 100) * 0.75


@pytest.mark.slow
def test_real_runs_send_what_the_formulas_say() -> None:
    benchmark = Path(__file__).parents[3] / "benchmarks" / "communication.py"
    done = subprocess.run(
        [sys.executable, str(benchmark), "--small"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gather weights" in done.stdout
