"""The command: what excludes what, exit codes, a configuration's findings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks.made_runs import make_run

from covey import cli


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["covey", "doctor", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code or 0  # type: ignore[return-value]


def test_this_host_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    code = run(monkeypatch, "--json")
    result = json.loads(capsys.readouterr().out)
    assert code == (0 if result["pass"] else 1)
    assert {"python", "shm", "ulimits", "cann", "nvidia_driver"} <= {finding["rule"] for finding in result["findings"]}


def test_a_healthy_run_exits_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    make_run(tmp_path / "run")
    assert run(monkeypatch, tmp_path / "run") == 0
    assert "0 failures, 0 warnings" in capsys.readouterr().out


def test_a_run_and_a_configuration_exclude_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert run(monkeypatch, tmp_path, "--config", "run.yaml") == 2
    assert "not both" in capsys.readouterr().err
    assert run(monkeypatch, tmp_path, "--set", "train.lr=1") == 2
    assert "only with --config" in capsys.readouterr().err


def test_a_configuration_is_checked_as_before_step_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The model and the data are missing: preflight's own findings say so, and the exit code is 1."""
    file = tmp_path / "run.yaml"
    file.write_text(
        f"model: {{path: {tmp_path}/none}}\ndata: {{train: {tmp_path}/none.jsonl}}\n"
        f"reward: {{functions: [format]}}\noutput_dir: {tmp_path}/out\n",
        encoding="utf-8",
    )
    assert run(monkeypatch, "--config", file, "--json") == 1
    findings = {finding["rule"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["load_model"]["severity"] == "failure"
    assert findings["eos"]["severity"] == "skipped"
