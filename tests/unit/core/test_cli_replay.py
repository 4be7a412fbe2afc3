"""`covey replay` as a command: exit codes and JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from covey import cli
from covey.config.load import LoadedConfig
from covey.config.schema import Config
from covey.tools import tiny
from covey.trainer import train


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["covey", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replayed")
    tiny.make_model(directory / "model", seed=0)
    tiny.make_data(directory, seed=0)
    config = {
        "model": {"path": str(directory / "model")},
        "data": {"train": str(directory / "train.jsonl")},
        "rollout": {"num_samples": 4, "max_response_length": 8},
        "reward": {"functions": [{"name": "math"}], "num_workers": 0, "timeout_s": 300},
        "train": {"steps": 2, "batch_size": 4, "lr": 1e-3},
        "output_dir": str(directory / "run"),
        "device": "cpu",
    }
    train(LoadedConfig(Config.model_validate(config), {}, "test"), quiet=True)
    return directory / "run"


def test_an_equal_step_ends_with_0(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(monkeypatch, "replay", run, "--step", "2") == 0
    assert "step 2 was computed again with equal bits" in capsys.readouterr().out


def test_a_difference_ends_with_1_and_is_in_the_json(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = ("--only-train", "--set", "train.lr=2e-3", "--json")
    assert _main(monkeypatch, "replay", run, "--step", "1", *changed) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["pass"] is False and result["metrics"]["actor/lr"] == 2e-3
    first = result["first_difference"]
    assert (first["step"], first["rung"], first["name"]) == (1, "learning rate", "actor/lr")


def test_wrong_use_ends_with_2(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(monkeypatch, "replay", run, "--step", "1", "--only-train", "--only-rollout") == 2
    assert "exclude each other" in capsys.readouterr().err
    assert _main(monkeypatch, "replay", run, "--step", "3") == 2
    assert "no records of step 3" in capsys.readouterr().err
