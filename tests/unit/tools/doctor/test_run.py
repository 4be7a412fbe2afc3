"""Every rule speaks about the run in which its fault is planted, and healthy runs are quiet."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from benchmarks.made_runs import make_run
from benchmarks.planted_faults import RUNS
from benchmarks.planted_runs import verdict

from covey.tools.doctor.evidence import read_run
from covey.tools.doctor.rules import RULES
from covey.tools.doctor.run import diagnose, rules_page

ROOT = Path(__file__).parents[4]
MADE = [name for name, planted in RUNS.items() if planted.kind == "made"]
TRAINED = [name for name, planted in RUNS.items() if planted.kind == "trained"]


def test_every_rule_has_a_run_in_which_its_fault_is_planted():
    planted = {rule for run in RUNS.values() for rule in run.rules}
    assert set(RULES) - planted == set()


@pytest.mark.parametrize("name", MADE)
def test_doctor_names_the_planted_fault(name: str, tmp_path: Path):
    right, spoke = verdict(RUNS[name], tmp_path / name)
    assert right, [f"{finding.rule}: {finding.found}" for finding in spoke]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_doctor_names_the_fault_of_a_trained_run(name: str, material: Path):
    right, spoke = verdict(RUNS[name], material / name)
    assert right, [f"{finding.rule}: {finding.found}" for finding in spoke]
    view = read_run(material / name)
    assert view.has("timing/data", "timing/cpu", "memory/start_bytes", "memory/rollout_bytes", "memory/update_bytes")
    for line in view.steps:
        assert 0 < line["memory/start_bytes"] <= line["memory/peak_bytes"] < line["memory/limit_bytes"]
        assert max(line["memory/rollout_bytes"], line["memory/update_bytes"]) <= line["memory/peak_bytes"]


def test_findings_carry_step_numbers_metrics_and_remedy(tmp_path: Path):
    RUNS["collapse"].make(tmp_path / "run")
    finding = diagnose(tmp_path / "run")[1][0]
    assert (finding.rule, finding.severity) == ("reward_collapse", "failure")
    assert 22 <= finding.evidence["step"] <= 28  # the level falls after 66 % of 40 steps
    assert finding.evidence["peak"] == pytest.approx(0.8, abs=0.06)
    assert finding.evidence["end"] == pytest.approx(0.2, abs=0.06)
    assert finding.evidence["metrics"][0] == "grpo/score/mean"
    assert "train.lr / 3" in finding.fix


def test_memory_remedy_is_worked_out_from_the_runs_numbers(tmp_path: Path):
    """Start 30, update 76 of 80 GiB: 12 GiB over 80 %, of 46 that the update takes: 26 % fewer tokens."""
    RUNS["update_full"].make(tmp_path / "run")
    finding = next(f for f in diagnose(tmp_path / "run")[1] if f.rule == "memory_update")
    tokens = int(16384 * (1 - 12 / 46)) // 256 * 256
    assert f"train.max_tokens_per_micro_batch: {tokens} (now 16384)" in finding.fix
    assert "gradient_checkpointing" in finding.fix


def test_rules_without_their_metrics_are_skipped_with_the_reason(tmp_path: Path):
    make_run(tmp_path / "run", steps=4)
    found = {finding.rule: finding for finding in diagnose(tmp_path / "run")[1]}
    assert found["token_imbalance"].severity == "skipped"
    assert "update/token_imbalance" in found["token_imbalance"].found
    assert "fewer than 30 steps" in found["reward_flat"].found


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"metrics.jsonl and config.yaml not found; give the output_dir"):
        diagnose(tmp_path)
    make_run(tmp_path / "run", steps=2)
    (tmp_path / "run" / "metrics.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="no finished step"):
        diagnose(tmp_path / "run")


def test_a_run_without_records_is_diagnosed_from_its_metrics(tmp_path: Path):
    RUNS["alike"].make(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "rollouts")
    found = {finding.rule: finding.severity for finding in diagnose(tmp_path / "run")[1]}
    assert found["responses_alike"] == "ok"  # nothing to see without texts
    assert "failure" not in found.values()


def test_page_of_rules_is_printed_from_the_table():
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert rules_page().strip() in page, "run `python -m benchmarks.planted_runs --write`"
    table = page.split("<!-- planted faults -->")[1]
    assert [name for name in RUNS if f"| {name} (" not in table] == []


def test_json_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    import sys

    from covey import cli

    RUNS["constant"].make(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["covey", "doctor", str(tmp_path / "run"), "--json"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    result = json.loads(capsys.readouterr().out)
    assert result["pass"] is False
    assert result["findings"][0]["rule"] == "constant_reward"
    assert result["findings"][0]["fix"]
