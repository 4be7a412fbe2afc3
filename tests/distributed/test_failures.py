"""A rank that dies ends the run at once, and the run goes on from its checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from covey.tools import tiny

pytestmark = pytest.mark.slow


STEPS = 10


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("material")
    tiny.make_model(directory / "model", seed=0)
    tiny.make_data(directory, seed=0)
    return directory


def _file(material: Path, output: Path, *, every: int) -> Path:
    config = {
        "model": {"path": str(material / "model")},
        "data": {"train": str(material / "train.jsonl")},
        "rollout": {"num_samples": 2, "max_response_length": 6},
        "reward": {"functions": [{"name": "math"}], "timeout_s": 100},
        "algorithm": {"advantage": "group_center"},
        "train": {"steps": STEPS, "batch_size": 4, "lr": 1e-4},
        "checkpoint": {"every": every, "export": False},
        "output_dir": str(output),
        "device": "cpu",
    }
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def whole(material: Path) -> list[dict[str, float]]:
    """The metrics of the run that nobody disturbs."""
    code, text = _finish(_start(_file(material, material / "whole", every=2)))
    assert code == 0, text
    return _untimed(material / "whole")


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
    material: Path, whole: list[dict[str, float]], tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    process = _start(_file(material, killed, every=2))
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

    code, text = _finish(_start(_file(material, killed, every=2), "--resume"))
    assert code == 0, text
    assert _untimed(killed) == whole


@finds_ranks
def test_a_rank_that_is_asked_to_stop_lets_all_finish_their_step_and_write_a_checkpoint(
    material: Path, whole: list[dict[str, float]], tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    process = _start(_file(material, asked, every=0))
    end = time.monotonic() + 120.0
    while len(_lines(asked)) < 2:
        assert process.poll() is None and time.monotonic() < end, _finish(process)
        time.sleep(0.02)
    os.kill(_workers(asked.with_suffix(".yaml"))[1], signal.SIGTERM)
    code, text = _finish(process)
    assert code != 0
    steps = len(_lines(asked))
    assert 2 <= steps < STEPS
    assert f"stopped after step {steps}; checkpoint" in text, text

    code, text = _finish(_start(_file(material, asked, every=0), "--resume"))
    assert code == 0, text
    assert _untimed(asked) == whole
