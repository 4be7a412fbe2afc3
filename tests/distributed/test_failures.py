"""A rank that dies ends the run at once, and the run goes on from its checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from covey.tools import tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("material")
    tiny.make_model(directory / "model", seed=0)
    tiny.make_data(directory, seed=0)
    return directory


def _file(material: Path, output: Path, *, steps: int = 8, every: int = 2) -> Path:
    config = {
        "model": {"path": str(material / "model")},
        "data": {"train": str(material / "train.jsonl")},
        "rollout": {"num_samples": 2, "max_response_length": 6},
        "reward": {"functions": [{"name": "math"}], "timeout_s": 100},
        "algorithm": {"advantage": "group_center"},
        "train": {"steps": steps, "batch_size": 4, "lr": 1e-4},
        "checkpoint": {"every": every, "export": False},
        "output_dir": str(output),
        "device": "cpu",
    }
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    return path


def _start(path: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "covey", "launch", "--nproc", "2", str(path), *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _finish(process: subprocess.Popen[str], timeout_s: float = 200.0) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def _lines(output: Path) -> list[dict[str, float]]:
    path = output / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _untimed(output: Path) -> list[dict[str, float]]:
    timed = ("timing/", "memory/", "e2e_tps", "update_tps", "vllm_tps", "rollout/generated_tps")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in _lines(output)]


def _workers(path: Path) -> list[int]:
    """Process ids of the ranks that train `path`, in their order."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [item for item in environment if item.startswith(b"RANK=")]
        if ranks and str(path).encode() in arguments:
            found.append((int(ranks[0].removeprefix(b"RANK=")), int(entry.name)))
    return [pid for _, pid in sorted(found)]


finds_ranks = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the ranks in /proc")


@finds_ranks
def test_a_killed_rank_ends_the_run_and_resuming_gives_the_run_that_was_not_killed(
    material: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code, text = _finish(_start(_file(material, whole)))
    assert code == 0, text

    process = _start(_file(material, killed))
    end = time.monotonic() + 120.0
    while len(_lines(killed)) < 3:
        assert process.poll() is None and time.monotonic() < end, _finish(process)
        time.sleep(0.02)
    os.kill(_workers(killed.with_suffix(".yaml"))[1], signal.SIGKILL)
    start = time.monotonic()
    code, text = _finish(process)
    assert time.monotonic() - start < 60.0
    assert code != 0
    assert "Signal 9" in text or "exitcode: -9" in text or "exitcode  : -9" in text, text

    code, text = _finish(_start(_file(material, killed), "--resume"))
    assert code == 0, text
    assert _untimed(killed) == _untimed(whole)


@finds_ranks
def test_a_rank_that_is_asked_to_stop_lets_all_finish_their_step_and_write_a_checkpoint(
    material: Path, tmp_path: Path
) -> None:
    whole, asked = tmp_path / "whole", tmp_path / "asked"
    code, text = _finish(_start(_file(material, whole, every=0)))
    assert code == 0, text

    process = _start(_file(material, asked, every=0))
    end = time.monotonic() + 120.0
    while len(_lines(asked)) < 2:
        assert process.poll() is None and time.monotonic() < end, _finish(process)
        time.sleep(0.02)
    os.kill(_workers(asked.with_suffix(".yaml"))[1], signal.SIGTERM)
    code, text = _finish(process)
    assert code != 0
    steps = len(_lines(asked))
    assert 2 <= steps < 8
    assert f"stopped after step {steps}; checkpoint" in text, text

    code, text = _finish(_start(_file(material, asked, every=0), "--resume"))
    assert code == 0, text
    assert _untimed(asked) == _untimed(whole)


@finds_ranks
def test_ten_kills_at_random_moments_change_nothing(material: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code, text = _finish(_start(_file(material, whole, steps=24, every=1)))
    assert code == 0, text

    rng = random.Random(0)
    process = _start(_file(material, killed, steps=24, every=1), "--max-restarts", "10")
    path = killed.with_suffix(".yaml")
    for number in range(10):
        before = len(_lines(killed))
        _wait(lambda: len(_workers(path)) == 2, process)  # a new life
        if number % 3:  # two of three lives get somewhere; the third may end at its start
            _wait(lambda before=before: len(_lines(killed)) > min(before, 22), process)
        time.sleep(rng.uniform(0.0, 0.5))
        if workers := _workers(path):
            os.kill(rng.choice(workers), signal.SIGKILL)
        _wait(lambda workers=workers: not set(_workers(path)) & set(workers), process)
    code, text = _finish(process)
    assert code == 0, text
    assert _untimed(killed) == _untimed(whole)


def _wait(condition: Callable[[], bool], process: subprocess.Popen[str], timeout_s: float = 120.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None and time.monotonic() < end, _finish(process)
        time.sleep(0.01)
