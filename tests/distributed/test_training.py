"""Whole GRPO runs on two ranks: the same weights and metrics as on one, checkpoints that any layout resumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed import cases
from tests.distributed.harness import run
from transformers import AutoModelForCausalLM

from covey.config.load import LoadedConfig
from covey.config.schema import Config
from covey.tools import export, tiny
from covey.trainer import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("material")
    tiny.make_model(directory / "model", seed=0)
    tiny.make_data(directory, seed=0)
    return directory


def _train(material: Path, output: Path, changes: dict[str, Any], resume: bool | str | None = None) -> dict[str, Any]:
    data = {
        "model": {"path": str(material / "model")},
        "data": {"train": str(material / "train.jsonl"), "eval": str(material / "eval.jsonl"), "eval_rows": 4},
        "rollout": {"num_samples": 3, "max_response_length": 8},
        "reward": {"functions": [{"name": "covey.rewards.rules:format_reward"}, {"name": "math"}], "timeout_s": 100.0},
        "algorithm": {"kl_coef": 0.01, "epochs": 2, "mini_batch_size": 3, "advantage": "group_center"},
        "train": {"steps": 2, "batch_size": 6, "lr": 1e-4, "eps": 1e-4, "max_tokens_per_micro_batch": 120},
        "evaluation": {"every": 2},
        "checkpoint": {"every": 1, "keep_last": 5},
        "output_dir": str(output),
        "device": "cpu",
    }
    for section, values in changes.items():
        data[section] = {**data.get(section, {}), **values}
    return train(LoadedConfig(Config.model_validate(data), {}, "test"), resume=resume, quiet=True)


def _weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


def _metrics(output: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing/", "memory/", "e2e_tps", "update_tps", "vllm_tps", "rollout/generated_tps", "update/token_imb")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


@pytest.fixture(scope="module")
def alone(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("alone") / "run"
    run(1, _train, material, output, {})
    return output


@pytest.fixture(scope="module")
def together(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("together") / "run"
    run(2, _train, material, output, {"checkpoint": {"background": True}})
    return output


@pytest.fixture(scope="module")
def cut(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("cut") / "run"
    run(4, _train, material, output, {"parallel": {"tp": 2, "sequence_parallel": True}})
    return output


@pytest.fixture(scope="module")
def staged(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("staged") / "run"
    run(2, _train, material, output, {"parallel": {"pp": 2}})
    return output


@pytest.mark.parametrize("layout", ["together", "cut", "staged"])
def test_several_ranks_end_in_the_weights_of_one(alone: Path, layout: str, request: pytest.FixtureRequest) -> None:
    expected, output = _weights(alone), request.getfixturevalue(layout)
    assert any(line.get("actor/grad_norm", 0.0) > 0.01 for line in _metrics(alone))
    assert cases.relative(_weights(output), expected) < 1e-5
    for line, wanted in zip(_metrics(output), _metrics(alone), strict=True):
        assert line == pytest.approx(wanted, rel=1e-3, abs=2e-5)


def test_only_the_first_rank_writes_and_every_step_has_its_records(together: Path, alone: Path) -> None:
    files = {str(p.relative_to(together)) for p in together.glob("**/*.parquet")}
    assert files == {str(p.relative_to(alone)) for p in alone.glob("**/*.parquet")}
    assert len((together / "metrics.jsonl").read_text().splitlines()) == 3


def _resume(material: Path, source: Path, output: Path, world: int, layout: dict[str, int] | None = None) -> None:
    name = "step-000001"
    shutil.copytree(source / "checkpoints" / name, output / "checkpoints" / name)
    shutil.copy(source / "metrics.jsonl", output / "metrics.jsonl")
    run(world, _train, material, output, {"parallel": layout or {}}, True)


def test_the_same_world_resumes_bit_for_bit(material: Path, together: Path, tmp_path: Path) -> None:
    _resume(material, together, tmp_path / "run", 2)
    expected, found = _weights(together), _weights(tmp_path / "run")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert _metrics(tmp_path / "run") == _metrics(together)


@pytest.mark.parametrize(
    ("source", "world", "layout"),
    [
        ("together", 1, {}),
        ("alone", 2, {}),
        ("together", 2, {"tp": 2}),
        ("alone", 2, {"cp": 2}),
        ("cut", 1, {}),
        ("cut", 3, {}),
        ("staged", 1, {}),
        ("alone", 2, {"pp": 2}),
        ("staged", 4, {"pp": 2, "tp": 2}),
    ],
)
def test_another_layout_resumes_to_the_same_weights(
    material: Path, request: pytest.FixtureRequest, tmp_path: Path, source: str, world: int, layout: dict[str, int]
) -> None:
    start: Path = request.getfixturevalue(source)
    _resume(material, start, tmp_path / "run", world, layout)
    assert cases.relative(_weights(tmp_path / "run"), _weights(start)) < 1e-5


@pytest.mark.parametrize("layout", ["together", "staged"])
def test_export_of_a_checkpoint_in_pieces_is_the_model_of_the_run(
    layout: str, alone: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    output = request.getfixturevalue(layout)
    summary = export.run(output, tmp_path / "model")
    assert summary["checkpoint"].endswith("step-000002")
    found, expected = load_file(tmp_path / "model" / "model.safetensors"), _weights(output)
    assert found.keys() == expected.keys() == _weights(alone).keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    a, b = (AutoModelForCausalLM.from_pretrained(p) for p in (tmp_path / "model", output / "model"))
    ids = torch.arange(1, 9)[None]
    assert torch.equal(a(ids).logits, b(ids).logits)


@pytest.mark.parametrize("damage", ["truncated", "missing", "unfinished"])
def test_a_damaged_checkpoint_falls_back_on_all_ranks(
    material: Path, together: Path, tmp_path: Path, damage: str
) -> None:
    output = tmp_path / "run"
    shutil.copytree(together / "checkpoints", output / "checkpoints")
    newest = output / "checkpoints" / "step-000002"
    shard = newest / "__1_0.distcp"
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif damage == "missing":
        shard.unlink()
    else:
        (newest / "COMPLETE").unlink()
    shutil.copy(together / "metrics.jsonl", output / "metrics.jsonl")
    run(2, _train, material, output, {}, True)
    expected, found = _weights(together), _weights(output)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_pipeline_resumes_bit_for_bit_and_says_what_each_stage_holds(
    material: Path, staged: Path, tmp_path: Path
) -> None:
    _resume(material, staged, tmp_path / "run", 2, {"pp": 2})
    expected, found = _weights(staged), _weights(tmp_path / "run")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert _metrics(tmp_path / "run") == _metrics(staged)
    facts = json.loads((staged / "run.json").read_text())
    assert facts["Device"]["processes"] == "pp 2 = 2"
    assert facts["Device"]["stage 0"] == "embedding, layer 0"
    assert facts["Device"]["stage 1"] == "layer 1, norm and head"


def _refused(material: Path, output: Path) -> str:
    with pytest.raises(ValueError) as caught:
        _train(material, output, {"parallel": {"dp_replicate": 3}})
    return str(caught.value)


def test_degrees_that_do_not_fit_the_processes_are_refused(material: Path, tmp_path: Path) -> None:
    for message in run(2, _refused, material, tmp_path / "run"):
        assert "dp_replicate 3" in message
        assert "2 processes" in message
