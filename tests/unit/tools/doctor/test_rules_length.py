"""Rules about lengths at the edge: what looks like the fault and is none."""

from __future__ import annotations

from pathlib import Path

from tests.unit.tools.doctor.near import finding


def test_longer_responses_that_pay_are_no_creep(tmp_path: Path):
    def longer(drawn, step, t):
        drawn.length = 200 + 240 * t  # rewards from 0.3 to 0.8

    assert finding("length_creep", tmp_path, longer).severity == "ok"


def test_shorter_responses_that_pay_are_no_collapse(tmp_path: Path):
    def shorter(drawn, step, t):
        drawn.length = 200 - 180 * t

    assert finding("length_collapse", tmp_path, shorter).severity == "ok"


def test_truncation_that_is_learned_away_is_none(tmp_path: Path):
    def less(drawn, step, t):
        drawn.truncated = 0.6 * max(0.0, 0.5 - t)

    assert finding("truncated", tmp_path, less).severity == "ok"


def test_the_remedy_for_truncation_has_this_runs_limit(tmp_path: Path):
    def cut(drawn, step, t):
        drawn.truncated = 0.4

    found = finding("truncated", tmp_path, cut, rollout={"num_samples": 8, "max_response_length": 300})
    assert "rollout.max_response_length: 600" in found.fix
    assert "algorithm.overlong_buffer: 60" in found.fix


def test_stop_tokens_are_shown_when_nothing_stops(tmp_path: Path):
    def never(drawn, step, t):
        drawn.truncated = 1.0

    found = finding("never_stops", tmp_path, never)
    assert found.severity == "failure"
    assert "<|im_end|> (151645)" in found.found
