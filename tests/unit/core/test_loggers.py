"""Loggers against the files and lines they must leave."""

import io
import json
import math
import sys
from pathlib import Path

import pytest
from rich.console import Console

from covey.config.schema import LoggingConfig
from covey.loggers import ConsoleLogger, JsonlLogger, describe, open_loggers, read_metrics


def write_steps(path: Path, steps: range, first_step: int = 0) -> None:
    logger = JsonlLogger(path, first_step=first_step)
    for step in steps:
        logger.write(step, {"actor/lr": step / 10, "grpo/score/mean": step / 3})
    logger.close()


def test_resumed_file_equals_the_uninterrupted_one(tmp_path: Path):
    write_steps(tmp_path / "whole.jsonl", range(1, 9))
    write_steps(tmp_path / "resumed.jsonl", range(1, 7))
    write_steps(tmp_path / "resumed.jsonl", range(4, 9), first_step=4)
    assert (tmp_path / "resumed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_line_cut_by_a_crash_is_replaced(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 6))
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]
    write_steps(path, range(5, 6), first_step=5)
    assert path.read_bytes() == whole


def test_line_is_on_disk_before_close(tmp_path: Path):
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.write(1, {"actor/lr": 0.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "actor/lr": 0.5}
    logger.close()


def test_numbers_outside_json_are_strict_json_and_come_back(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.write(1, {"actor/loss": math.nan, "actor/grad_norm": math.inf, "actor/ppo_kl": -math.inf})
    logger.close()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    values = read_metrics(path)[0]
    assert math.isnan(values["actor/loss"])
    assert (values["actor/grad_norm"], values["actor/ppo_kl"]) == (math.inf, -math.inf)


def test_damaged_line_is_named(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"stop": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a line of metrics"):
        JsonlLogger(path)


def test_without_a_terminal_a_step_is_one_plain_line():
    stream = io.StringIO()
    logger = ConsoleLogger(100, console=Console(file=stream, width=40))
    logger.write(7, {"grpo/score/mean": 0.5, "response_length/mean": 31.25, "actor/entropy": 1.0, "timing/all": 2.0})
    logger.close()
    assert stream.getvalue() == "step   7/100  reward 0.500  length 31.2  entropy 1.000  s 2.00\n"


def test_lines_may_be_thinned_out_but_not_the_first_the_last_and_evaluations():
    stream = io.StringIO()
    logger = ConsoleLogger(9, console=Console(file=stream, width=80), print_every=4)
    for step in range(10):
        logger.write(step, {"grpo/score/mean": 0.5} | ({"eval/reward": 0.25} if step == 6 else {}))
    logger.close()
    shown = [line.split("/")[0].removeprefix("step ") for line in stream.getvalue().splitlines()]
    assert shown == ["0", "1", "4", "6", "8", "9"]


@pytest.mark.parametrize("no_color", [False, True])
def test_terminal_has_a_bar_and_honours_no_color(monkeypatch: pytest.MonkeyPatch, no_color: bool):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1") if no_color else monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO()
    logger = ConsoleLogger(4, console=Console(file=stream, force_terminal=True, width=100))
    logger.write(1, {"grpo/score/mean": 0.5})
    logger.write(3, {"grpo/score/mean": 0.75})
    logger.close()
    shown = stream.getvalue()
    assert "step 3/4  reward 0.750" in shown
    assert "3/4" in shown.rpartition("reward 0.750")[2]
    assert ("\x1b[3" in shown.replace("\x1b[3A", "")) != no_color


def test_evaluation_alone_is_shown_and_unknown_columns_are_not_hidden():
    assert describe({"eval/reward": 0.25, "eval/pass@1": 0.5}) == "eval reward 0.250  eval pass@1 0.500"
    assert describe({"memory/peak_bytes": 1024.0}) == "memory/peak_bytes 1024"


def test_undeclared_metric_is_refused(tmp_path: Path):
    loggers = open_loggers(LoggingConfig(), tmp_path, total_steps=3)
    with pytest.raises(ValueError, match="not declared"):
        loggers.write(1, {"my/number": 1.0})
    loggers.close()


def test_tensorboard_holds_the_values_of_a_resumed_run_once(tmp_path: Path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first, steps in ((0, range(1, 5)), (3, range(3, 6))):
        loggers = open_loggers(LoggingConfig(tensorboard=True), tmp_path, total_steps=5, first_step=first)
        for step in steps:
            loggers.write(step, {"actor/lr": step / 2, "eval/reward": 0.25})
        loggers.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/actor/lr")] == [
        (1, 0.5),
        (2, 1.0),
        (3, 1.5),
        (4, 2.0),
        (5, 2.5),
    ]
    assert len(events.Scalars("eval/reward")) == 5


@pytest.mark.parametrize("service", ["wandb", "swanlab"])
def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, service: str):
    monkeypatch.setitem(sys.modules, service, None)  # what Python does for a module that cannot be imported
    config = LoggingConfig.model_validate({f"{service}_project": "p"})
    with pytest.raises(ImportError, match=rf"pip install 'covey\[{service}\]'"):
        open_loggers(config, tmp_path, total_steps=1)


def test_wandb_resumes_one_run(tmp_path: Path):
    pytest.importorskip("wandb")
    for first in (0, 2):
        loggers = open_loggers(LoggingConfig(wandb_project="p"), tmp_path, total_steps=2, first_step=first)
        loggers.write(first, {"actor/lr": 0.5})
        loggers.close()
    assert len({path.name.rpartition("-")[2] for path in (tmp_path / "wandb").glob("offline-run-*")}) == 1


def test_mindspeeds_names_reach_console_and_tensorboard_and_the_file_keeps_coveys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = LoggingConfig(names="mindspeed_dapo", longest_in_tps=True, tensorboard=True)
    logger = open_loggers(config, tmp_path, total_steps=9)
    values = {
        "actor/loss": -0.25,  # of which pg_loss is 0.5 and the KL term the rest
        "actor/pg_loss": 0.5,
        "grpo/score/mean": 0.125,
        "timing/sync": 2.0,
        "prompt_length/mean": 10.0,
        "prompt_length/max": 20.0,
        "response_length/mean": 30.0,
        "response_length/max": 100.0,
        "e2e_tps": 400.0,  # 10 s at 100 responses on one device: (10 + 30) x 100 / 10
    }
    logger.write(3, values)
    logger.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 3} | values]
    line = " ".join(capsys.readouterr().err.split())
    for text in ("iteration: 3 / 9 | ", "actor/pg_loss : 0.25", "dapo/score/mean : 0.125", "e2e_tps : 1200"):
        assert text in line  # (20 + 100) x 100 / 10
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]}
    assert scalars["train/actor/pg_loss"] == 0.25
    assert scalars["train/timing/resharding_to_infer"] == 2.0
    assert "train/grpo/score/mean" not in scalars
