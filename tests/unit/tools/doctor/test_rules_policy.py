"""Rules about the update at the edge: what looks like the fault and is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.tools.doctor.near import finding


def _update(**values):
    def change(drawn, step, t):
        drawn.update |= {name.replace("__", "/"): v(t) if callable(v) else v for name, v in values.items()}

    return change


def test_entropy_may_vanish_when_the_task_is_learned(tmp_path: Path):
    def learned(drawn, step, t):
        drawn.level, drawn.update["actor/entropy"] = 0.5 + 0.4 * t, 0.4 * (1 - t) ** 3 + 0.01

    assert finding("entropy_collapse", tmp_path, learned).severity == "ok"


def test_one_spike_is_no_pattern(tmp_path: Path):
    def once(drawn, step, t):
        drawn.update["actor/grad_norm"] = 40.0 if step == 20 else 0.4

    assert finding("gradient_spikes", tmp_path, once).severity == "ok"


def test_clip_ranges_are_judged_by_their_effect(tmp_path: Path):
    settings = {"clip_low": 0.01, "clip_high": 0.01}
    assert finding("clip_range", tmp_path / "quiet", algorithm=settings).severity == "ok"
    clipped = _update(actor__pg_clipfrac=0.6)
    assert finding("clip_range", tmp_path / "loud", clipped, algorithm=settings).severity == "warning"
    assert finding("clip_range", tmp_path / "usual", clipped).severity == "ok"  # large_updates speaks instead
    wide = finding("clip_range", tmp_path / "wide", _update(actor__ppo_kl=0.2), algorithm={"clip_high": 5.0})
    assert wide.severity == "warning"


def test_a_zero_gradient_without_spread_is_the_rewards_fault(tmp_path: Path):
    def equal(drawn, step, t):
        drawn.level, drawn.update["actor/grad_norm"] = 0.0, 0.0

    assert finding("gradient_vanished", tmp_path, equal).severity == "ok"


def test_metrics_that_are_not_finite_are_named(tmp_path: Path):
    found = finding("non_finite", tmp_path, _update(actor__loss=lambda t: float("nan") if t > 0.5 else 0.1))
    assert found.severity == "failure"
    assert "not finite: actor/loss" in found.found


def test_weights_of_the_last_update_are_not_stale_with_several_updates_a_step(tmp_path: Path):
    """2 epochs x 2 mini-batches: step s is sampled by the weights of optimizer step 4 (s - 1)."""
    settings = {"epochs": 2, "mini_batch_size": 8}
    assert finding("stale_weights", tmp_path / "fresh", algorithm=settings).severity == "ok"

    def late(drawn, step, t):
        drawn.version = 3 * (step - 1)  # three of four updates arrive

    found = finding("stale_weights", tmp_path / "late", late, algorithm=settings)
    assert (found.severity, found.evidence["expected"], found.evidence["found"]) == ("failure", 156, 117)


def test_skipped_optimizer_steps_explain_older_weights(tmp_path: Path):
    def skipped(drawn, step, t):
        drawn.version = max(0, step - 2)
        drawn.update["actor/skipped_steps"] = float(step == 2)

    assert finding("stale_weights", tmp_path, skipped).severity == "ok"


def test_a_run_under_way_may_still_be_warming_up(tmp_path: Path):
    warming = _update(actor__lr=lambda t: 1e-7 * t)
    assert finding("lr_never_arrives", tmp_path / "ended", warming).severity == "warning"
    train = {"steps": 400, "batch_size": 16, "lr": 1e-6}
    assert finding("lr_never_arrives", tmp_path / "running", warming, train=train).severity == "ok"


@pytest.mark.parametrize(("gap", "expected"), [(0.009, "ok"), (0.02, "warning"), (0.06, "failure")])
def test_mismatch_by_its_size(gap: float, expected: str, tmp_path: Path):
    assert finding("rollout_mismatch", tmp_path, _update(**{"rollout__logprob_gap_mean": gap})).severity == expected


def test_warm_up_excuses_an_early_dip(tmp_path: Path):
    def dip(drawn, step, t):
        drawn.level = 0.5 if step == 1 else 0.2 + 0.5 * t

    assert finding("no_warmup", tmp_path, dip).severity == "ok"
