"""The command line as a user meets it: output, exit codes, no tracebacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from covey import __version__, cli

RUN = "model: {path: m}\ndata: {train: d.jsonl}\nreward: {functions: [{name: math}]}\noutput_dir: o\n"


def _covey(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "covey", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """The exit code of the command in this process (faster than a new one)."""
    monkeypatch.setattr(sys, "argv", ["covey", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    code = stopped.value.code
    return code if isinstance(code, int) else 0 if code is None else 1


def test_help_names_the_commands_and_answers_at_once() -> None:
    start = time.perf_counter()
    result = _covey("--help")
    seconds = time.perf_counter() - start
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("train", "sft", "evaluate", "show", "config", "quickstart"))
    assert seconds < 5  # 0.3 s on an idle machine; importing torch alone would take longer than this under load


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"covey {__version__}\n"


def test_config_show_prints_values_and_origins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    assert _main(monkeypatch, "config", "show", path, "--set", "train.lr=1e-4", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"]["train"]["lr"] == 1e-4
    assert shown["origins"]["train.lr"] == "--set"
    assert shown["origins"]["model.path"] == f"{path}:1"


def test_config_show_reads_files_of_a_cold_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text("model: {path: m}\nsft: {data: d.jsonl}\noutput_dir: o\n")
    assert _main(monkeypatch, "config", "show", path) == 0
    assert "data: d.jsonl" in capsys.readouterr().out


def test_config_reference_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(monkeypatch, "config", "reference", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert any(row["key"] == "train.lr" and row["default"] == 1e-6 for row in rows)


@pytest.mark.parametrize("command", ["train", "sft", "evaluate"])
def test_a_broken_file_is_exit_code_2_without_traceback(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {pth: m}\n")
    assert _main(monkeypatch, command, path) == 2
    text = capsys.readouterr()
    assert text.out == ""
    assert text.err.startswith(f"error: {path} has ")
    assert "model.pth" in text.err
    assert _main(monkeypatch, command, tmp_path / "absent.yaml") == 2


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = _covey("config", "show", tmp_path / "absent.yaml", COVEY_DEBUG="1")
    assert "Traceback" in result.stderr
    assert "no such file" in result.stderr


@pytest.mark.parametrize("arguments", [["nonsense"], ["config", "show"], ["train", "x.yaml", "--nope"]])
def test_usage_errors_are_exit_code_2(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _main(monkeypatch, *arguments) == 2


def test_a_missing_checkpoint_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    assert _main(monkeypatch, "train", path, "--resume-from", tmp_path / "nowhere") == 2
    assert "nowhere: no such directory" in capsys.readouterr().err


def test_os_errors_name_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    cli._print_error(OSError(28, "No space left on device", "runs/x/metrics.jsonl"))
    assert capsys.readouterr().err == "error: runs/x/metrics.jsonl: No space left on device\n"


def test_interruption_is_exit_code_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load", interrupt)
    assert _main(monkeypatch, "train", tmp_path / "run.yaml") == 130


def test_config_check_exits_1_for_what_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "upstream.yaml"
    text = "megatron_training: {stage: STAGE, tokenizer_name_or_path: m, data_path: d, global_batch_size: 4}\n"
    path.write_text(
        text.replace("STAGE", "ray_ppo") + "rl_config: {n_samples_per_prompt: 4, verifier_function: [math]}\n"
    )
    assert _main(monkeypatch, "config", "check", path, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "cannot"
    stage = next(row for row in report["keys"] if row["key"] == "megatron_training.stage")
    assert (stage["value"], stage["verdict"], stage["line"]) == ("ray_ppo", "not supported", 1)
    assert _main(monkeypatch, "train", path) == 2
    assert "critic" in capsys.readouterr().err
    path.write_text(path.read_text().replace("ray_ppo", "ray_grpo"))
    assert _main(monkeypatch, "config", "check", path) == 0
    assert "runs with 2 differences" in capsys.readouterr().out  # the sampling defaults that are not taken over


def test_config_convert_prints_a_file_that_config_show_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "upstream.yaml"
    path.write_text(
        "megatron_training: {tokenizer_name_or_path: m, data_path: d, global_batch_size: 4, train_iters: 7}\n"
        "rl_config: {n_samples_per_prompt: 4, verifier_function: [math]}\n"
    )
    assert _main(monkeypatch, "config", "convert", path) == 0
    native = tmp_path / "native.yaml"
    native.write_text(capsys.readouterr().out)
    assert _main(monkeypatch, "config", "show", native, "--json") == 0
    assert json.loads(capsys.readouterr().out)["config"]["train"]["steps"] == 7
    assert _main(monkeypatch, "config", "convert", native) == 2  # it is Covey's format already
    assert "already" in capsys.readouterr().err
