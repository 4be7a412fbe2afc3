"""Whole runs: the same seed gives the same run, and a run that was stopped goes on as if it had not been."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from covey.config.load import LoadedConfig
from covey.config.schema import Config
from covey.tools import tiny
from covey.trainer import train


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("material")
    tiny.make_model(directory / "model", seed=0)
    tiny.make_data(directory, seed=0)
    return directory


def _config(material: Path, output: Path, **changes: dict) -> LoadedConfig[Config]:
    data = {
        "model": {"path": str(material / "model")},
        "data": {"train": str(material / "train.jsonl"), "eval": str(material / "eval.jsonl"), "eval_rows": 4},
        "rollout": {"num_samples": 4, "max_response_length": 12, "top_p": 0.95},
        "reward": {"functions": [{"name": "covey.rewards.rules:format_reward"}, {"name": "math"}]},
        # Two epochs of two mini-batches: old log-probabilities, the clip and the KL term all take part.
        "algorithm": {"kl_coef": 0.01, "epochs": 2, "mini_batch_size": 3, "advantage": "group_center"},
        "train": {"steps": 5, "batch_size": 6, "lr": 1e-3, "schedule": "linear", "warmup_steps": 2},
        "evaluation": {"every": 2},
        "checkpoint": {"every": 1, "keep_last": 10},
        "output_dir": str(output),
        "device": "cpu",
    }
    for section, values in changes.items():
        data[section] = {**data[section], **values}
    return LoadedConfig(Config.model_validate(data), {}, "test")


def _metrics(output: Path) -> list[dict]:
    """metrics.jsonl without what depends on the clock and the process."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing/", "memory/", "e2e_tps", "update_tps", "vllm_tps", "rollout/generated_tps")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def _weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def whole_run(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "run"
    train(_config(material, output), quiet=True)
    return output


def test_the_same_seed_gives_the_same_run(material: Path, whole_run: Path, tmp_path: Path) -> None:
    train(_config(material, tmp_path / "run"), quiet=True)
    assert _metrics(tmp_path / "run") == _metrics(whole_run)
    again, first = _weights(tmp_path / "run"), _weights(whole_run)
    assert all(torch.equal(again[name], first[name]) for name in first)


def test_another_seed_gives_another_run(material: Path, whole_run: Path, tmp_path: Path) -> None:
    config = _config(material, tmp_path / "run", train={"steps": 1})
    config.config.seed = 99
    train(config, quiet=True)
    assert _metrics(tmp_path / "run")[1] != _metrics(whole_run)[1]


@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_resumed_run_equals_the_uninterrupted_one(material: Path, whole_run: Path, tmp_path: Path, step: int) -> None:
    output = tmp_path / "run"
    name = f"step-{step:06d}"
    shutil.copytree(whole_run / "checkpoints" / name, output / "checkpoints" / name)
    # The killed run had logged more than its last checkpoint knew, and half a line.
    text = (whole_run / "metrics.jsonl").read_text()
    (output / "metrics.jsonl").write_text(text[: int(len(text) * 0.9)])
    train(_config(material, output), resume=True, quiet=True)
    assert _metrics(output) == _metrics(whole_run)
    resumed, first = _weights(output), _weights(whole_run)
    assert all(torch.equal(resumed[name], first[name]) for name in first)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    material: Path, whole_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "run"
    shutil.copytree(whole_run / "checkpoints", output / "checkpoints")
    shutil.rmtree(output / "checkpoints" / "step-000005")
    damaged = output / "checkpoints" / "step-000004" / "training.pt"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    train(_config(material, output), resume=True, quiet=True)
    assert "step-000004 is damaged" in caplog.text
    resumed, first = _weights(output), _weights(whole_run)
    assert all(torch.equal(resumed[name], first[name]) for name in first)


def test_the_token_budget_changes_only_rounding(material: Path, whole_run: Path, tmp_path: Path) -> None:
    """Adam divides by the root of tiny second moments, so weights are compared after one step, against its size."""
    outputs = {}
    for budget in (16384, 64):
        output = tmp_path / str(budget)
        config = _config(
            material,
            output,
            train={"steps": 1, "max_tokens_per_micro_batch": budget, "logits_chunk_bytes": budget * 512},
            algorithm={"epochs": 1, "mini_batch_size": None},
        )
        train(config, quiet=True)
        outputs[budget] = _metrics(output)[1]
    for name in ("actor/grad_norm", "actor/entropy", "actor/kl_loss"):
        assert outputs[64][name] == pytest.approx(outputs[16384][name], rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("rollout", "algorithm"),
    [
        ({"top_p": 1.0}, {}),
        ({"top_p": 0.9, "top_k": 20, "min_p": 0.01}, {"sampling_consistent": True}),
    ],
)
def test_the_rollout_agrees_with_training(material: Path, tmp_path: Path, rollout: dict, algorithm: dict) -> None:
    """With filters on, log-probabilities agree when training renormalises over the same tokens."""
    train(_config(material, tmp_path / "run", train={"steps": 2}, rollout=rollout, algorithm=algorithm), quiet=True)
    for line in _metrics(tmp_path / "run")[1:]:
        assert line["rollout/logprob_gap_max"] <= 1e-4
        assert line["rollout/logprob_gap_mean"] <= 1e-6
