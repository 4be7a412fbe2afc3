"""Rules about memory: which phase is blamed, and what is no growth."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.tools.doctor.near import finding


@pytest.mark.parametrize("phase", ["update", "scoring", "rollout"])
def test_only_the_phase_with_the_peak_is_blamed(phase: str, tmp_path: Path):
    def full(drawn, step, t):
        drawn.memory |= {"update": 73.0, "scoring": 73.0, "rollout": 73.0, phase: 77.0}

    phases = ("update", "scoring", "rollout")
    outcomes = {name: finding(f"memory_{name}", tmp_path / name, full).severity for name in phases}
    assert outcomes == {name: "warning" if name == phase else "ok" for name in outcomes}


def test_a_cache_that_fills_and_stays_is_no_leak(tmp_path: Path):
    def cache(drawn, step, t):
        drawn.memory["start"] = 20 + 20 * min(1.0, 2 * t)

    assert finding("memory_growth", tmp_path, cache).severity == "ok"


def test_growth_is_given_by_step_and_how_long_it_lasts(tmp_path: Path):
    """Half a GiB a step from 20: at step 40 40 of 80 GiB are in use, 80 steps are left."""

    def leak(drawn, step, t):
        drawn.memory["start"] = 20 + 0.5 * step

    found = finding("memory_growth", tmp_path, leak)
    assert found.evidence["bytes_per_step"] == pytest.approx(2**29, rel=0.01)
    assert found.evidence["steps_left"] == pytest.approx(80, rel=0.02)


def test_a_run_that_is_complete_did_not_end_for_memory(tmp_path: Path):
    def full(drawn, step, t):
        drawn.memory["update"] = 77.0

    assert finding("ended_near_limit", tmp_path, full).severity == "ok"


def test_checkpointing_and_offload_are_named_only_where_they_are_off(tmp_path: Path):
    def full(drawn, step, t):
        drawn.memory["update"] = 77.0

    off = finding("memory_update", tmp_path / "off", full)
    model = {"path": "m", "gradient_checkpointing": True}
    on = finding("memory_update", tmp_path / "on", full, model=model, reference={"offload": True})
    assert "gradient_checkpointing" in off.fix
    assert "reference.offload" in off.fix
    assert "gradient_checkpointing" not in on.fix
    assert "reference.offload" not in on.fix


def test_the_remedy_for_a_rollout_lowers_the_cache_by_what_is_over(tmp_path: Path):
    """78 of 80 GiB: 14 over 80 %; a cache of 30 GiB becomes 16."""

    def full(drawn, step, t):
        drawn.memory["rollout"] = 78.0

    rollout = {"num_samples": 8, "max_response_length": 512, "kv_cache_bytes": 30 * 2**30}
    found = finding("memory_rollout", tmp_path, full, rollout=rollout)
    assert f"rollout.kv_cache_bytes: {16 * 2**30} " in found.fix
