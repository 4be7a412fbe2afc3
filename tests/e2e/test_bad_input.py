"""What a user can get wrong, through the command line: one paragraph or a counted warning, never a traceback."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from covey.cli import main
from covey.tools import tiny


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("material")
    tiny.make_model(directory / "model", seed=0)
    tiny.make_data(directory, seed=0)
    return directory


@pytest.fixture
def config(material: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(material / "model")},
        "data": {"train": str(material / "train.jsonl")},
        "rollout": {"num_samples": 2, "max_response_length": 6},
        "reward": {"functions": [{"name": "format"}]},
        "train": {"steps": 2, "batch_size": 2},
        "logging": {"records": False},
        "output_dir": str(tmp_path / "run"),
        "device": "cpu",
    }


Run = Callable[..., tuple[int, str, dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `covey train` on a configuration; returns (exit code, standard error, summary)."""

    def call(config: dict[str, Any], *options: str) -> tuple[int, str, dict[str, Any]]:
        file = tmp_path / "run.yaml"
        file.write_text(yaml.safe_dump(config))
        monkeypatch.setattr(sys, "argv", ["covey", "train", str(file), "--json", *options])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        code = stop.value.code
        assert "Traceback" not in err, err
        return 0 if code is None else int(code), " ".join(err.split()), json.loads(out) if out.strip() else {}

    return call


def _lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]


def test_a_good_run_ends_with_0_and_a_summary(run: Run, config: dict[str, Any]) -> None:
    code, _, summary = run(config)
    assert code == 0
    assert summary["steps"] == 2
    assert (Path(summary["model"]) / "config.json").exists()


@pytest.mark.parametrize(
    ("section", "key", "value", "expected"),
    [
        ("data", "train", "no/such/rows.jsonl", "no/such/rows.jsonl"),
        ("data", "prompt_key", "Problem", "'problem'"),
        ("data", "max_prompt_length", 2, "max_prompt_length"),
        ("model", "path", "./no-such-model", "no such directory"),
        ("rollout", "num_samples", 1, "at least 2 responses"),
        ("rollout", "max_response_length", 100_000, "positions for 512"),
        ("rollout", "stop_token_ids", [100_000], "outside the model's vocabulary"),
        ("algorithm", "loss", "grop", "grpo"),
        ("algorithm", "advantage", "group_nrom", "'group_norm'"),
        ("algorithm", "advantage", "no_such_module:mine", "No module named 'no_such_module'"),
        ("algorithm", "mini_batch_size", 3, "not a multiple"),
        ("evaluation", "pass_on", "fromat", "did you mean 'format'"),
        ("reference", "sync_every", 3, "algorithm.kl_coef"),
        ("distillation", "teacher", "./no-such-model", "no such directory"),
        ("train", "lr", "fast", "train.lr"),
        ("train", "learning_rate", 1.0, "train.learning_rate"),
    ],
)
def test_a_wrong_setting_is_named(
    run: Run, config: dict[str, Any], section: str, key: str, value: Any, expected: str
) -> None:
    config.setdefault(section, {})[key] = value
    code, err, _ = run(config)
    assert code == 2
    assert expected in err
    assert not (Path(config["output_dir"]) / "metrics.jsonl").exists()


def test_an_unknown_reward_is_named(run: Run, config: dict[str, Any]) -> None:
    config["reward"]["functions"] = [{"name": "fromat"}]
    code, err, _ = run(config)
    assert code == 2
    assert "'format'" in err


def test_an_empty_data_set(run: Run, config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    config["data"]["train"] = str(tmp_path / "empty.jsonl")
    code, err, _ = run(config)
    assert code == 2
    assert "empty" in err


def test_long_prompts_are_dropped_and_counted(
    run: Run, config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"problem": "1+1=", "answer": "2"}] * 3 + [{"problem": "1+" * 40 + "1=", "answer": "41"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config["data"] |= {"train": str(tmp_path / "rows.jsonl"), "max_prompt_length": 10}
    code, _, _ = run(config)
    assert code == 0
    assert "1 of 4 rows left out" in caplog.text


def test_a_tokenizer_without_eos(run: Run, config: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = tiny.make_tokenizer()
    tokenizer.eos_token = None
    model = AutoModelForCausalLM.from_pretrained(config["model"]["path"])
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config["model"]["path"] = str(tmp_path / "model")
    code, err, _ = run(config)
    assert code == 2
    assert "no token ends a response" in err
    assert "rollout.stop_token_ids" in err


def test_a_tokenizer_of_another_model(run: Run, config: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens(["one", "more"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config["model"]["tokenizer"] = str(tmp_path / "tokenizer")
    code, err, _ = run(config)
    assert code == 2
    assert "does not belong to model.path" in err


@pytest.mark.parametrize(
    "body", ["return [float('nan')] * len(responses)", "return 1 / 0", "return [1.0] * (len(responses) + 1)"]
)
def test_a_failing_reward_is_counted_and_never_a_zero(
    run: Run, config: dict[str, Any], tmp_path: Path, body: str
) -> None:
    (tmp_path / "bad.py").write_text(f"def bad(responses, rows, config):\n    {body}\n")
    config["reward"]["functions"] = [{"name": f"{tmp_path / 'bad.py'}:bad"}]
    code, err, _ = run(config)
    assert code == 2
    assert "unscored 100%" in err  # nothing to learn from: the run does not start
    config["preflight"] = {"skip": {"rewards": "to see what is counted"}}
    code, _, _ = run(config)
    assert code == 0
    for line in _lines(config["output_dir"]):
        assert line["reward/errors"] > 0
        assert line["reward/none_share"] == 1.0
        assert "grpo/score/mean" not in line
        assert line["actor/grad_norm"] == 0.0


def test_a_failing_reward_can_end_the_run(run: Run, config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def bad(responses, rows, config):\n    raise KeyError('gold')\n")
    config["reward"] |= {"functions": [{"name": f"{tmp_path / 'bad.py'}:bad"}], "on_error": "raise"}
    code, err, _ = run(config)
    assert code == 2
    assert "KeyError" in err


def test_the_output_directory_of_another_run(run: Run, config: dict[str, Any]) -> None:
    assert run(config)[0] == 0
    before = (Path(config["output_dir"]) / "metrics.jsonl").read_bytes()
    code, err, _ = run(config)
    assert code == 2
    assert "already holds a run" in err
    assert "--resume" in err
    assert (Path(config["output_dir"]) / "metrics.jsonl").read_bytes() == before


def test_an_output_directory_that_is_a_file(run: Run, config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    config["output_dir"] = str(tmp_path / "file")
    code, err, _ = run(config)
    assert code == 2
    assert "is a file" in err
    assert (tmp_path / "file").read_text() == "precious"


def test_a_disk_that_cannot_be_written(run: Run, config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config["output_dir"] = str(tmp_path / "file" / "run")
    code, err, _ = run(config)
    assert code == 2
    assert str(tmp_path / "file") in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk(run: Run, config: dict[str, Any]) -> None:
    output = Path(config["output_dir"])
    output.mkdir()
    (output / "summary.json").symlink_to("/dev/full")
    code, err, _ = run(config)
    assert code == 2
    assert "No space left" in err


def test_ctrl_c_finishes_the_step_and_the_checkpoint(
    run: Run, config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config["train"]["steps"] = 10_000
    metrics = Path(config["output_dir"]) / "metrics.jsonl"

    def interrupt() -> None:
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            if stopped.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGINT)

    stopped = threading.Event()
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        code, _, _ = run(config)
    finally:
        stopped.set()
        thread.join()
    assert code == 130
    assert "go on with --resume" in caplog.text
    done = _lines(config["output_dir"])[-1]["step"]
    checkpoints = Path(config["output_dir"]) / "checkpoints"
    assert [p.name for p in checkpoints.iterdir()] == [f"step-{done:06d}"]
    config["train"]["steps"] = int(done) + 1
    assert run(config, "--resume")[0] == 0
    assert [line["step"] for line in _lines(config["output_dir"])] == list(range(1, int(done) + 2))
