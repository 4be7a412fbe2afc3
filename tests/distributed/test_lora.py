"""An adapter on several ranks: the gradient, log-probabilities and weights of one process, whatever cuts the model."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.distributed import cases
from tests.distributed.harness import run
from transformers import AutoModelForCausalLM

from covey.config.load import LoadedConfig
from covey.config.schema import Config
from covey.distributed import mesh as meshes
from covey.models.adapters import add_adapter, is_adapter_weight, without_adapter
from covey.rollout.engine import Sampling
from covey.rollout.native import NativeEngine
from covey.rollout.shared import SharedEngine
from covey.tools import export, tiny
from covey.trainer import train

Layout = tuple[int, dict[str, int], dict[str, Any]]
LAYOUTS: list[Layout] = [(2, {}, {}), (2, {"tp": 2}, {"sequence_parallel": True}), (2, {"pp": 2}, {})]
MORE_LAYOUTS: list[Layout] = [(4, {"dp_replicate": 2}, {}), (2, {"tp": 2}, {}), (2, {"cp": 2}, {})]


def _policy(family: str, sizes: dict[str, Any], options: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """Of a model whose adapter does something; frozen weights in `dtype`, the adapter's in fp32 on several ranks."""
    mesh = meshes.start(communication="gloo", device=cases.CPU, **sizes)
    model = cases.model(family).to(dtype)
    add_adapter(model, base="base", rank=3, alpha=6, seed=1, dtype=dtype if mesh.world == 1 else torch.float32)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator).to(dtype))
    return cases.policy_of(model, mesh, compute_dtype=dtype, **options)


def _measure(family: str, sizes: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    policy = _policy(family, sizes, options)
    groups = cases.batch().groups
    with without_adapter(policy.model):
        base = policy.logprobs(groups)
    found = cases.measure(policy, {"loss": "grpo"})
    weights = {name: tensor.clone() for name, tensor in policy.weights()}
    meshes.stop()
    return found | {"base": base, "weights": weights}


@functools.cache
def _alone(family: str) -> dict[str, Any]:
    return run(1, _measure, family, {}, {})[0]


def _check(family: str, layout: Layout) -> None:
    world, sizes, options = layout
    expected = _alone(family)
    assert all(is_adapter_weight(name) for name in expected["gradients"])
    assert float((expected["base"] - expected["logprobs"]).abs().max()) > 0.1
    together: dict[str, torch.Tensor] = {}
    for found in run(world, _measure, family, sizes, options):
        together |= found["gradients"]
        for key in ("base", "logprobs"):
            torch.testing.assert_close(found[key], expected[key], rtol=0, atol=5e-6)
        for name, value in expected["stats"].items():
            assert found["stats"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
        size = sum(float(g.double().square().sum()) for g in expected["gradients"].values()) ** 0.5
        assert found["norm"] == pytest.approx(size, rel=1e-5)
        assert found["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-6, atol=1e-6)
    assert cases.relative(together, expected["gradients"]) < 1e-5


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_are_those_of_one_process(layout: Layout) -> None:
    _check("qwen2", layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", MORE_LAYOUTS, ids=str)
def test_gradients_are_those_of_one_process_in_other_layouts(layout: Layout) -> None:
    _check("qwen2", layout)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_every_family_can_be_cut_beside_its_adapters(family: str) -> None:
    _check(family, (2, {"tp": 2}, {"sequence_parallel": True}))


def _sixteen_bits(sizes: dict[str, int]) -> dict[str, Any]:
    policy = _policy("qwen2", sizes, {}, torch.bfloat16)
    kinds = {(p.requires_grad, p.dtype) for p in policy.model.parameters()}
    prompts = [group.prompt for group in cases.batch().groups]
    sampling = Sampling(num_samples=2, max_response_length=8, temperature=0.8, seed=3, step=0)
    with policy.gathered():
        engine = NativeEngine(policy.model, stop_token_ids=[3], decode=str, max_num_seqs=9, kv_cache_bytes=1 << 22)
    groups = SharedEngine(engine, policy.mesh, policy.gathered).generate(prompts, sampling)
    sampled = torch.tensor([lp for group in groups for response in group.responses for lp in response.logprobs])
    gap = float((policy.logprobs(groups) - sampled).abs().max())
    with without_adapter(policy.model):
        without = float((policy.logprobs(groups) - sampled).abs().max())
    meshes.stop()
    return {"kinds": kinds, "gap": gap, "without": without}


def test_frozen_weights_stay_in_sixteen_bits_beside_fp32_adapters() -> None:
    for found in run(2, _sixteen_bits, {}):
        assert found["kinds"] == {(False, torch.bfloat16), (True, torch.float32)}
        assert found["gap"] < 0.25 < 0.5 < found["without"]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("material")
    tiny.make_model(directory / "model", seed=0)
    tiny.make_data(directory, seed=0)
    return directory


def _train(material: Path, output: Path, parallel: dict[str, Any], resume: bool | None = None) -> dict[str, Any]:
    data = {
        "model": {"path": str(material / "model")},
        "lora": {"rank": 4, "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]},
        "data": {"train": str(material / "train.jsonl"), "eval": str(material / "eval.jsonl"), "eval_rows": 4},
        "rollout": {"num_samples": 3, "max_response_length": 8},
        "reward": {"functions": [{"name": "covey.rewards.rules:format_reward"}, {"name": "math"}]},
        "algorithm": {"kl_coef": 0.01, "epochs": 2, "mini_batch_size": 3, "advantage": "group_center"},
        "train": {"steps": 2, "batch_size": 6, "lr": 1e-3, "eps": 1e-4, "max_tokens_per_micro_batch": 120},
        "checkpoint": {"every": 1, "keep_last": 5},
        "preflight": {"skip": {"lengths": "responses are short to be quick"}},
        "parallel": parallel,
        "output_dir": str(output),
        "device": "cpu",
    }
    return train(LoadedConfig(Config.model_validate(data), {}, "test"), resume=resume, quiet=True)


def _files(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors") | load_file(
        output / "adapter" / "adapter_model.safetensors"
    )


def _metrics(output: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    kept = ("actor/", "critic/", "response_length/")
    return [{k: v for k, v in line.items() if k.startswith(kept)} for line in lines]


@pytest.fixture(scope="module")
def alone(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("alone") / "run"
    run(1, _train, material, output, {})
    return output


@pytest.fixture(scope="module")
def together(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("together") / "run"
    run(2, _train, material, output, {})
    return output


@pytest.mark.slow
def test_a_run_on_two_ranks_ends_in_the_adapter_of_one(material: Path, alone: Path, together: Path) -> None:
    assert cases.relative(_files(together), _files(alone)) < 1e-5
    for line, expected in zip(_metrics(together), _metrics(alone), strict=True):
        assert line == pytest.approx(expected, rel=1e-3, abs=2e-5)
    ids = torch.arange(1, 20)[None]
    base = AutoModelForCausalLM.from_pretrained(material / "model")
    merged = AutoModelForCausalLM.from_pretrained(together / "model")
    with torch.no_grad():
        before = base(ids).logits
        logits = PeftModel.from_pretrained(base, str(together / "adapter"))(ids).logits
        torch.testing.assert_close(merged(ids).logits, logits, rtol=0, atol=1e-5)
    assert float((before - logits).abs().max()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("source", "world", "layout"), [("together", 1, {}), ("alone", 2, {"tp": 2})])
def test_another_layout_goes_on_from_the_adapter(
    material: Path, request: pytest.FixtureRequest, tmp_path: Path, source: str, world: int, layout: dict[str, int]
) -> None:
    start: Path = request.getfixturevalue(source)
    output, name = tmp_path / "run", "step-000001"
    shutil.copytree(start / "checkpoints" / name, output / "checkpoints" / name)
    shutil.copy(start / "metrics.jsonl", output / "metrics.jsonl")
    run(world, _train, material, output, layout, True)
    assert cases.relative(_files(output), _files(start)) < 1e-5


@pytest.mark.slow
def test_a_sharded_checkpoint_is_exported_by_one_process(together: Path, tmp_path: Path) -> None:
    export.run(together, tmp_path / "merged")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    expected = load_file(together / "model" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert cases.relative(found, expected) < 1e-6
