"""Replays of real runs: equal bits on the device that made the record, and every planted change found by its name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from covey.config.load import LoadedConfig
from covey.config.schema import Config
from covey.rollout.records import records_path
from covey.tools import tiny
from covey.tools.replay import replay
from covey.trainer import train

pytestmark = pytest.mark.slow  # whole runs

STEPS = 5
RUNS: dict[str, dict[str, Any]] = {
    # As the quickstart: one optimizer step a rollout, no checkpoint before the end.
    "plain": {},
    "epochs and reference": {
        "rollout": {"top_p": 0.9},
        "algorithm": {"epochs": 2, "mini_batch_size": 3, "kl_coef": 0.05, "kl_target": 0.1, "kl_horizon": 100},
        "checkpoint": {"every": 2, "keep_last": 10},
    },
    "dynamic sampling and shaped rewards": {
        "algorithm": {"max_rounds": 3, "kl_coef": 0.01, "kl_in_reward": True, "overlong_buffer": 4},
        "reward": {"normalization": "zscore"},
        "checkpoint": {"every": 1, "keep_last": 10},
    },
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("material")
    tiny.make_model(directory / "model", seed=0)
    tiny.make_data(directory, seed=0)
    return directory


def _train(material: Path, output: Path, changes: dict[str, Any]) -> None:
    data: dict[str, Any] = {
        "model": {"path": str(material / "model")},
        "data": {"train": str(material / "train.jsonl")},
        "rollout": {"num_samples": 4, "max_response_length": 12},
        "reward": {
            "functions": [{"name": "covey.rewards.rules:format_reward"}, {"name": "math", "weight": 0.5}],
            "timeout_s": 300,  # a time limit that a busy machine reaches would be a difference
        },
        "train": {"steps": STEPS, "batch_size": 6, "lr": 1e-3, "schedule": "linear"},
        "output_dir": str(output),
        "device": "cpu",
    }
    for section, values in changes.items():
        data[section] = {**data.get(section, {}), **values}
    train(LoadedConfig(Config.model_validate(data), {}, "test"), quiet=True)


@pytest.fixture(scope="module")
def runs(material: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp("runs") / "run" for name in RUNS}
    for name, output in made.items():
        _train(material, output, RUNS[name])
    return made


@pytest.fixture
def copy(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A run to plant something in."""
    return shutil.copytree(runs["epochs and reference"], tmp_path / "copy")


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("step", random.Random(8).sample(range(1, STEPS + 1), 3))
def test_a_replay_has_equal_bits(runs: dict[str, Path], name: str, step: int) -> None:
    result = replay(runs[name], step)
    assert result["pass"], result["first_difference"]
    dynamic = name.startswith("dynamic")
    assert result["profile"] == "equal bits"
    compared = {check["rung"] for check in result["checks"] if check["step"] == step}
    assert compared == {
        "responses", "rewards", "logprobs", "advantages", "learning rate", "loss", "gradient", "weights",
    }  # fmt: skip
    assert all(check["difference"] == 0 for check in result["checks"] if check["rung"] != "responses" or not dynamic)


def test_the_state_before_a_step_is_said(runs: dict[str, Path]) -> None:
    """With checkpoints the newest one before the step; without, the starting weights and all steps up to it."""
    state = replay(runs["epochs and reference"], 4, rollout=False)["state"]
    assert state == "checkpoint step-000002, then steps 3 to 3 from their records"
    result = replay(runs["plain"], 4, rollout=False)
    assert "the starting weights" in result["state"] and "then steps 1 to 3 from their records" in result["state"]
    assert {check["step"] for check in result["checks"]} == {1, 2, 3, 4}  # verified on the way


def test_half_a_step_can_be_replayed(runs: dict[str, Path]) -> None:
    trained = replay(runs["plain"], 3, rollout=False)
    assert trained["pass"] and "responses" not in {check["rung"] for check in trained["checks"]}
    lines = [json.loads(line) for line in (runs["plain"] / "metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line["step"] == 3]
    assert trained["metrics"]["actor/grad_norm"] == line["actor/grad_norm"]
    sampled = replay(runs["plain"], 3, update=False)
    assert sampled["pass"] and not sampled["metrics"]
    assert {check["rung"] for check in sampled["checks"] if check["step"] == 3} == {"responses", "rewards"}


def _edit(path: Path, column: str, change: Callable[[list[Any]], list[Any]]) -> None:
    table = pq.read_table(path)
    index = table.column_names.index(column)
    edited = pa.array(change(table[column].to_pylist()), type=table.schema.field(index).type)
    pq.write_table(table.set_column(index, table.schema.field(index), edited), path)


def _first(result: dict[str, Any]) -> tuple[int, str, str]:
    assert not result["pass"]
    first = result["first_difference"]
    return first["step"], first["rung"], first["name"]


def test_an_edited_reward_is_found(copy: Path) -> None:
    _edit(records_path(copy, 3), "reward", lambda values: [v + 0.125 for v in values])
    assert _first(replay(copy, 3)) == (3, "rewards", "total")
    # Without scoring it shows where it was used: the recorded advantages are of the true rewards.
    _edit(records_path(copy, 5), "reward", lambda values: [v * v for v in values])
    assert _first(replay(copy, 5, rollout=False)) == (5, "advantages", "advantages")


def test_an_edited_part_of_a_reward_is_found(copy: Path) -> None:
    _edit(records_path(copy, 3), "score/math", lambda values: [v + 1.0 for v in values])
    assert _first(replay(copy, 3)) == (3, "rewards", "math")


def test_an_edited_response_is_found(copy: Path) -> None:
    _edit(records_path(copy, 3), "response_ids", lambda values: [row[::-1] for row in values])
    assert _first(replay(copy, 3)) == (3, "responses", "share of responses that differ")
    assert _first(replay(copy, 3, rollout=False))[:2] == (3, "logprobs")


def test_an_edited_record_between_checkpoint_and_step_is_found_there(copy: Path) -> None:
    _edit(records_path(copy, 3), "reward", lambda values: [v * v for v in values])
    assert _first(replay(copy, 4, rollout=False))[:2] == (3, "advantages")


@pytest.mark.parametrize(
    ("override", "rung", "name"),
    [
        ("train.lr=2e-3", "learning rate", "actor/lr"),
        ("algorithm.entropy_coef=0.1", "loss", "actor/loss"),
        ("algorithm.advantage=group_center", "advantages", "advantages"),
        ("algorithm.kl_estimator=k1", "loss", "actor/loss"),
        ("train.max_grad_norm=0.001", "loss", "actor/loss"),
        ("train.weight_decay=0.5", "loss", "actor/loss"),
        ("rollout.temperature=0.9", "logprobs", "old_logprobs"),
    ],
)
def test_a_changed_setting_is_found(runs: dict[str, Path], override: str, rung: str, name: str) -> None:
    """Two epochs: what changes an optimizer step shows in the loss of the next one."""
    result = replay(runs["epochs and reference"], 3, rollout=False, overrides=[override])
    assert _first(result) == (3, rung, name)


def test_with_one_optimizer_step_a_changed_decay_is_found_in_the_weights(runs: dict[str, Path]) -> None:
    result = replay(runs["plain"], 1, rollout=False, overrides=["train.weight_decay=0.5"])
    assert _first(result) == (1, "weights", "checksum")
    assert {c["rung"] for c in result["checks"] if not c["ok"]} == {"weights"}


def test_other_sampling_is_found(runs: dict[str, Path]) -> None:
    result = replay(runs["plain"], 2, update=False, overrides=["rollout.temperature=0.5"])
    assert _first(result)[1] in ("responses", "logprobs")


def test_other_weights_are_found(material: Path, runs: dict[str, Path], tmp_path: Path) -> None:
    """One number of the starting weights."""
    other = shutil.copytree(material / "model", tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] += 0.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    result = replay(runs["plain"], 1, overrides=[f"model.path={other}"])
    step, rung, _ = _first(result)
    assert (step, rung) in ((1, "responses"), (1, "logprobs"))


def test_on_another_number_of_threads_or_device_a_tolerance_is_used(copy: Path) -> None:
    """Planted in the record: it was made elsewhere. Here that only changes what is asked for, not the numbers."""
    for step in (3, 4):
        path = records_path(copy, step)
        table = pq.read_table(path)
        metadata = dict(table.schema.metadata)
        made_on = json.loads(metadata[b"covey_made_on"])
        metadata[b"covey_made_on"] = json.dumps(made_on | {"device": "cpu (another)"}).encode()
        pq.write_table(table.replace_schema_metadata(metadata), path)
    result = replay(copy, 4)
    assert result["pass"] and result["profile"] == "float32" and "device: cpu (another) then" in result["why"]
    (weights,) = [check for check in result["checks"] if check["rung"] == "weights" and check["step"] == 4]
    assert weights["name"] == "checkpoint step-000004" and weights["difference"] == 0
    assert _first(replay(copy, 4, rollout=False, overrides=["train.lr=1.1e-3"]))[1] == "learning rate"
    shutil.rmtree(copy / "checkpoints" / "step-000004")
    assert "weights: not compared" in replay(copy, 4, rollout=False)["notes"][0]


def test_what_a_replay_needs_and_lacks_is_said(runs: dict[str, Path], copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no config.yaml, so not the output_dir of a run"):
        replay(tmp_path, 1)
    with pytest.raises(ValueError, match=r"no records of step 9; recorded: 1 to 5, 5 steps"):
        replay(runs["plain"], 9)
    records_path(copy, 3).unlink()
    with pytest.raises(ValueError, match=r"newest state before it is .*step-000002, and the records of steps \[3\]"):
        replay(copy, 4)
    assert replay(copy, 5)["pass"]  # follows a checkpoint
    table = pq.read_table(records_path(copy, 5))
    old = table.replace_schema_metadata({"covey_format": "1", "covey_step": "5"})
    pq.write_table(old, records_path(copy, 5))
    with pytest.raises(ValueError, match="written by an older version"):
        replay(copy, 5)
