"""Debug mode finds where numbers break, and changes none of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from covey.config.load import LoadedConfig
from covey.config.schema import Config
from covey.models.finite import NonFiniteError
from covey.tools import tiny
from covey.trainer import train


@pytest.fixture
def material(tmp_path: Path) -> Path:
    tiny.make_model(tmp_path / "model", seed=0)
    tiny.make_data(tmp_path, seed=0)
    return tmp_path


@pytest.fixture(autouse=True)
def without_anomaly_detection() -> Iterator[None]:
    yield
    torch.autograd.set_detect_anomaly(False)


def _train(material: Path, name: str, **changes: Any) -> list[dict[str, float]]:
    """The metrics of two steps that do not depend on the clock."""
    data: dict[str, Any] = {
        "model": {"path": str(material / "model")},
        "data": {"train": str(material / "train.jsonl")},
        "rollout": {"num_samples": 4, "max_response_length": 12},
        "reward": {"functions": [{"name": "math"}], "num_workers": 0, "timeout_s": 300},
        "algorithm": {"kl_coef": 0.01, "epochs": 2, "mini_batch_size": 3},
        "train": {"steps": 2, "batch_size": 6, "lr": 1e-3},
        "output_dir": str(material / name),
        "device": "cpu",
        **changes,
    }
    train(LoadedConfig(Config.model_validate(data), {}, "test"), quiet=True)
    lines = [json.loads(line) for line in (material / name / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing/", "memory/", "e2e_tps", "update_tps", "vllm_tps", "rollout/generated_tps")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def test_debug_mode_keeps_every_bit(material: Path) -> None:
    plain, debugged = _train(material, "plain"), _train(material, "debugged", debug=True)
    assert plain == debugged
    first, second = (load_file(material / name / "model" / "model.safetensors") for name in ("plain", "debugged"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_layer_with_nan_is_named(material: Path) -> None:
    path = material / "model" / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(
        NonFiniteError, match=r"^debug: model\.layers\.1\.mlp\.down_proj \(Linear\) is the first module"
    ):
        _train(material, "broken", debug=True)


LOSS = """
import torch
from covey.algorithm.losses import TokenLoss

def endless(logprobs, old_logprobs, advantages, response_index, num_responses, options):
    true = torch.ones_like(logprobs, dtype=torch.bool)
    loss = (logprobs - logprobs.detach()).sqrt()
    return TokenLoss(loss, ~true, torch.ones_like(logprobs), true)
"""


def test_a_loss_whose_gradient_breaks_is_named(material: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every forward is finite, the gradient is 0 x infinity."""
    (material / "endless_loss.py").write_text(LOSS)
    monkeypatch.syspath_prepend(str(material))
    with pytest.raises((NonFiniteError, RuntimeError), match=r"gradients of .* not finite|returned nan values"):
        _train(material, "broken", debug=True, algorithm={"loss": "endless_loss:endless"})
