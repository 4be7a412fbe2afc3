"""A run of several ranks is replayed on one: sums in another order, so within tolerances, and faults are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.distributed.harness import run

from covey.config.load import LoadedConfig
from covey.config.schema import Config
from covey.tools import tiny
from covey.tools.replay import replay
from covey.trainer import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("material")
    tiny.make_model(directory / "model", seed=0)
    tiny.make_data(directory, seed=0)
    return directory


def _train(material: Path, output: Path, parallel: dict[str, int]) -> None:
    data: dict[str, Any] = {
        "model": {"path": str(material / "model")},
        "data": {"train": str(material / "train.jsonl")},
        "rollout": {"num_samples": 4, "max_response_length": 8},
        "reward": {"functions": [{"name": "covey.rewards.rules:format_reward"}, {"name": "math"}], "num_workers": 0},
        "algorithm": {"kl_coef": 0.01, "epochs": 2, "mini_batch_size": 3},
        "train": {"steps": 3, "batch_size": 6, "lr": 1e-4, "eps": 1e-4, "max_tokens_per_micro_batch": 120},
        "checkpoint": {"every": 1, "keep_last": 5, "export": False},
        "parallel": parallel,
        "output_dir": str(output),
        "device": "cpu",
    }
    train(LoadedConfig(Config.model_validate(data), {}, "test"), quiet=True)


@pytest.mark.parametrize("parallel", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_a_step_of_two_ranks_is_replayed_on_one(material: Path, tmp_path: Path, parallel: dict[str, int]) -> None:
    output = tmp_path / "run"
    run(2, _train, material, output, parallel)
    result = replay(output, 3)
    assert result["pass"], result["first_difference"]
    assert result["profile"] == "float32" and "processes: 2 then, 1 now" in result["why"]
    (weights,) = [check for check in result["checks"] if check["rung"] == "weights"]
    assert 0 < weights["difference"] <= 1e-5
    compared = {check["rung"] for check in result["checks"]}
    assert compared == {
        "responses", "rewards", "logprobs", "advantages", "learning rate", "loss", "gradient", "weights",
    }  # fmt: skip
    changed = replay(output, 3, rollout=False, overrides=["algorithm.clip_low=0.0001"])
    assert changed["first_difference"]["rung"] in ("loss", "gradient")
