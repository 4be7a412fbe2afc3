"""Runs of two processes with a reference that follows, steered coefficients, replaced groups, a teacher: the weights
and metrics of one process, and bit for bit the same after a kill."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import cases
from tests.distributed.harness import run
from tests.invariants.run_cases import make_material, metrics_of, run_case, weights_of

pytestmark = pytest.mark.slow
# As in test_training.py: AdamW must not divide by second moments of rounding size.
GENTLE = {"train": {"steps": 4, "batch_size": 4, "lr": 1e-4, "eps": 1e-4, "max_tokens_per_micro_batch": 120}}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_material(tmp_path_factory.mktemp("material"))


def _run(name: str, material: Path, output: Path, changes: dict[str, Any], resume: bool = False) -> None:
    run_case(name, material, output, resume=resume, **GENTLE, **changes)


def _compare(together: Path, alone: Path) -> None:
    assert cases.relative(weights_of(together), weights_of(alone)) < 1e-5
    for line, wanted in zip(metrics_of(together), metrics_of(alone), strict=True):
        line.pop("update/token_imbalance", None)
        assert line == pytest.approx(wanted, rel=1e-3, abs=2e-5)


@pytest.mark.parametrize("name", ["everything at once", "reference that becomes the policy", "distillation alone"])
def test_two_ranks_end_where_one_does_and_resume_bit_for_bit(name: str, material: Path, tmp_path: Path) -> None:
    run(1, _run, name, material, tmp_path / "alone", {})
    run(2, _run, name, material, tmp_path / "together", {})
    _compare(tmp_path / "together", tmp_path / "alone")
    resumed, checkpoint = tmp_path / "resumed", "step-000003"  # 3: between two moves of the reference
    shutil.copytree(tmp_path / "together" / "checkpoints" / checkpoint, resumed / "checkpoints" / checkpoint)
    shutil.copy(tmp_path / "together" / "metrics.jsonl", resumed / "metrics.jsonl")
    run(2, _run, name, material, resumed, {}, True)
    first, again = weights_of(tmp_path / "together"), weights_of(resumed)
    assert all(torch.equal(again[key], first[key]) for key in first)
    assert metrics_of(resumed) == metrics_of(tmp_path / "together")


def test_tensor_parallel_ranks_end_where_one_does_and_another_layout_resumes(material: Path, tmp_path: Path) -> None:
    name = "everything at once"
    run(1, _run, name, material, tmp_path / "alone", {})
    run(2, _run, name, material, tmp_path / "cut", {"parallel": {"tp": 2}})
    _compare(tmp_path / "cut", tmp_path / "alone")
    resumed, checkpoint = tmp_path / "resumed", "step-000003"
    shutil.copytree(tmp_path / "cut" / "checkpoints" / checkpoint, resumed / "checkpoints" / checkpoint)
    shutil.copy(tmp_path / "cut" / "metrics.jsonl", resumed / "metrics.jsonl")
    run(2, _run, name, material, resumed, {}, True)  # dp 2: its reference is cut along other lines
    assert cases.relative(weights_of(resumed), weights_of(tmp_path / "alone")) < 1e-5
