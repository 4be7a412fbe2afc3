"""Small runs whose state is more than weights and moments, for the tests of resume and of several processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from covey.config.load import LoadedConfig
from covey.config.schema import Config
from covey.tools import tiny
from covey.trainer import train

STEPS = 5


def make_material(directory: Path) -> Path:
    """A model, a teacher of other weights, and rows."""
    tiny.make_model(directory / "model", seed=0)
    tiny.make_model(directory / "teacher", seed=1)
    tiny.make_data(directory, seed=0)
    return directory


def config_of(material: Path, output: Path, **changes: Any) -> LoadedConfig[Config]:
    data: dict[str, Any] = {
        "model": {"path": str(material / "model")},
        "data": {"train": str(material / "train.jsonl")},
        "rollout": {"num_samples": 4, "max_response_length": 8},
        "reward": {"functions": [{"name": "covey.rewards.rules:format_reward"}, {"name": "math"}], "num_workers": 0},
        "algorithm": {"kl_coef": 0.05, "epochs": 2, "mini_batch_size": 2},
        "train": {"steps": STEPS, "batch_size": 4, "lr": 1e-3},
        "checkpoint": {"every": 1, "keep_last": 10},
        "output_dir": str(output),
        "device": "cpu",
    }
    for section, values in changes.items():
        data[section] = values if values is None else {**data.get(section, {}), **values}
    data = {section: values for section, values in data.items() if values is not None}
    return LoadedConfig(Config.model_validate(data), {}, "test")


def metrics_of(output: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what depends on the clock and the process."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing/", "memory/", "e2e_tps", "update_tps", "vllm_tps", "rollout/generated_tps")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def weights_of(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


# Enough learning that a step's reward has spread and the KL is not noise; what is steered must really move.
CASES: dict[str, dict[str, Any]] = {
    "reference that becomes the policy": {"reference": {"sync_every": 2}},
    "reference that is an average": {"reference": {"sync_every": 2, "decay": 0.7, "offload": True}},
    "kl_target": {
        "algorithm": {"kl_coef": 0.05, "epochs": 2, "mini_batch_size": 2, "kl_target": 0.01, "kl_horizon": 32}
    },
    "entropy_target": {"algorithm": {"entropy_coef": 0.01, "entropy_target": 5.3, "entropy_coef_delta": 0.002}},
    "dynamic sampling": {"algorithm": {"max_rounds": 3, "epochs": 1}},
    "distillation beside rewards": {"distillation": {"coef": 0.5, "discount": 0.9}},
    "everything at once": {
        "reference": {"sync_every": 2, "decay": 0.7},
        "algorithm": {
            "kl_target": 0.01,
            "kl_horizon": 32,
            "entropy_coef": 0.01,
            "entropy_target": 5.3,
            "entropy_coef_delta": 0.002,
            "max_rounds": 3,
        },
        "distillation": {"coef": 0.5, "discount": 0.9},
    },
    "distillation alone": {"reward": None, "algorithm": None, "distillation": {}},
}


def run_case(name: str, material: Path, output: Path, *, resume: bool = False, **changes: Any) -> None:
    case = CASES[name] | changes
    if "distillation" in case:
        case["distillation"] = {"teacher": str(material / "teacher"), **case["distillation"]}
    train(config_of(material, output, **case), resume=resume, quiet=True)
