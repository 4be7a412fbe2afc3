"""Rules about speed: which phase, rank or host is blamed, and what is no slow-down."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.tools.doctor.near import finding


@pytest.mark.parametrize("phase", ["rollout", "update", "sync", "rule_reward"])
def test_the_phase_that_grew_is_named(phase: str, tmp_path: Path):
    def slower(drawn, step, t):
        drawn.timings[phase] += 8.0 * (t > 0.5)

    found = finding("slow_phase", tmp_path, slower)
    assert found.severity == "warning"
    assert f"timing/{phase} has" in found.found
    assert 18 <= found.evidence["step"] <= 24  # from step 21 on


def test_longer_responses_are_no_slow_down(tmp_path: Path):
    def longer(drawn, step, t):
        drawn.length = 150 + 300 * t

    assert finding("slow_phase", tmp_path, longer).severity == "ok"


def test_a_slow_phase_is_not_put_down_to_the_host(tmp_path: Path):
    def slower(drawn, step, t):
        drawn.timings["update"] *= 1 + 3 * (step % 3 == 0)

    assert finding("host_noise", tmp_path, slower).severity == "ok"


def test_a_quiet_host_is_quiet(tmp_path: Path):
    assert finding("host_noise", tmp_path).severity == "ok"


def test_ranks_that_take_turns_are_no_slow_rank(tmp_path: Path):
    def turns(drawn, step, t):
        drawn.ranks = {"rollout_imbalance": 0.4, "rollout_slowest_rank": float(step % 8)}

    assert finding("slow_rank", tmp_path, turns).severity == "ok"


def test_the_first_step_is_left_out_of_shares(tmp_path: Path):
    def loading(drawn, step, t):
        drawn.timings["data"] = 60.0 if step == 1 else 0.01

    assert finding("data_bound", tmp_path, loading).severity == "ok"


def test_debug_in_a_short_run_is_what_it_is_for(tmp_path: Path):
    assert finding("debug_left_on", tmp_path / "short", steps=10, debug=True).severity == "ok"
    assert finding("debug_left_on", tmp_path / "long", steps=20, debug=True).severity == "warning"
