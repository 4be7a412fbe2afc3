"""LoRA through whole parts: the gradient of packed groups, rollout and training, the reference, runs, exports.

The independent side is peft's own model, run by transformers' attention on one sequence at a time.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from covey import evaluate, sft
from covey.config.load import LoadedConfig
from covey.config.schema import AlgorithmConfig, Config, SftRunConfig, TrainConfig
from covey.models.adapters import add_adapter, is_adapter_weight, without_adapter
from covey.models.load import prepare_model
from covey.models.packing import response_lengths
from covey.optim import Optimizer
from covey.policy import ForwardLimits, Policy
from covey.reference import BaseModel
from covey.rollout.engine import Sampling
from covey.rollout.native import NativeEngine
from covey.tools import export, tiny
from covey.tools.dry_run import dry_run
from covey.trainer import train
from covey.types import Group, Prompt, Response, StepBatch

CPU = torch.device("cpu")
VOCAB, TEMPERATURE = 97, 0.7
SHAPES = [(5, [3, 1, 7, 20]), (9, [6, 6]), (1, [1]), (12, [14, 4])]  # prompt length, response lengths


def _model(dtype: torch.dtype = torch.float32, *, adapter: bool = True) -> Any:
    """Two layers; the adapter moves the log-probabilities by about 1."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, num_hidden_layers=2, initializer_range=0.1, **sizes))
    model = model.to(dtype)
    if adapter:
        add_adapter(model, base="base", rank=4, alpha=8, seed=1, dtype=dtype)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def _policy(model: Any, *, max_tokens: int = 10_000) -> Policy:
    prepare_model(model)
    limits = ForwardLimits(max_tokens_per_micro_batch=max_tokens, logits_chunk_bytes=4 * VOCAB * 7)
    return Policy(
        model, device=CPU, temperature=TEMPERATURE, limits=limits, compute_dtype=next(model.parameters()).dtype
    )


def _groups() -> list[Group]:
    generator = torch.Generator().manual_seed(1)

    def ids(n: int) -> list[int]:
        return torch.randint(0, VOCAB, (n,), generator=generator).tolist()

    return [
        Group(Prompt(p, ids(num_prompt), ""), [Response(ids(n), [0.0] * n) for n in lengths])
        for p, (num_prompt, lengths) in enumerate(SHAPES)
    ]


class _Keep:
    """In the optimizer's place: keeps the gradients."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.gradients: dict[str, Tensor] = {}

    def step(self, lr: float) -> float:
        self.gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return 1.0


def _imitation_gradient(policy: Policy) -> dict[str, Tensor]:
    keep = _Keep(policy.model)
    policy.imitate(_groups(), optimizer=keep, lr=0.0)
    return keep.gradients


def _one_at_a_time(model: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Gradient of the mean cross-entropy, and log-probabilities, by transformers on prompt + response."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    groups = _groups()
    total = sum(response_lengths(groups))
    found = []
    for group in groups:
        for response in group.responses:
            prompt, answer = group.prompt.input_ids, response.token_ids
            logits = model(torch.tensor([prompt + answer])).logits[0] / TEMPERATURE
            logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            logprobs = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
            (-logprobs.sum() / total).backward()
            found.append(logprobs.detach())
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, torch.cat(found)


def _relative(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    difference = sum(float((actual[n] - expected[n]).double().square().sum()) for n in expected)
    return (difference / sum(float(g.double().square().sum()) for g in expected.values())) ** 0.5


def test_packed_gradients_are_those_of_separate_sequences() -> None:
    """Also over micro-batches of few tokens and with recomputed layers; of the adapter alone."""
    expected, logprobs = _one_at_a_time(_model())
    assert expected.keys() == {name for name, _ in _model().named_parameters() if is_adapter_weight(name)}
    for max_tokens, recomputed in ((10_000, False), (30, False), (30, True)):
        model = _model()
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = _policy(model, max_tokens=max_tokens)
        assert _relative(_imitation_gradient(policy), expected) < 1e-5
        torch.testing.assert_close(policy.logprobs(_groups()), logprobs, rtol=0, atol=1e-5)


def test_the_base_is_the_reference_bit_for_bit() -> None:
    policy, base = _policy(_model()), _policy(_model(adapter=False))
    expected = base.logprobs(_groups())
    reference = BaseModel(policy)
    before = policy.logprobs(_groups())
    assert torch.equal(reference.logprobs(_groups()), expected)
    assert torch.equal(policy.logprobs(_groups()), before)
    assert float((before - expected).abs().max()) > 0.5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.25)])
def test_the_rollout_samples_from_the_adapted_model(dtype: torch.dtype, tolerance: float) -> None:
    model = _model(dtype)
    policy = _policy(model)
    engine = NativeEngine(model, stop_token_ids=[3], decode=str, max_num_seqs=9, kv_cache_bytes=1 << 22)
    prompts = [group.prompt for group in _groups()]
    sampling = Sampling(num_samples=4, max_response_length=24, temperature=TEMPERATURE, seed=5, step=0)
    groups = engine.generate(prompts, sampling)
    sampled = torch.tensor([lp for group in groups for response in group.responses for lp in response.logprobs])
    gap = (policy.logprobs(groups) - sampled).abs()
    assert float(gap.max()) <= tolerance
    with without_adapter(model):
        base = policy.logprobs(groups)
    assert float((base - sampled).abs().max()) > 1.0, "the adapter makes a difference, and the rollout has it"


def test_sixteen_bit_adapters_learn_through_fp32_masters() -> None:
    """Steps below the spacing of bfloat16 add up; the frozen weights keep their bits."""
    model = _model(torch.bfloat16)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    policy = _policy(model)
    optimizer = Optimizer(model.parameters(), TrainConfig(lr=1e-4, weight_decay=0.0))
    assert len(optimizer.masters) == 28
    assert {master.dtype for master in optimizer.masters} == {torch.float32}
    before = [master.clone() for master in optimizer.masters]
    groups = _groups()
    rewards = np.random.default_rng(0).normal(size=sum(len(g.responses) for g in groups))
    batch = StepBatch(groups, rewards, rewards)
    for _ in range(3):
        policy.update(batch, AlgorithmConfig(), optimizer=optimizer, lr=lambda i: 1e-4, max_response_length=32)
    assert all(bool((now != then).any()) for now, then in zip(optimizer.masters, before, strict=True))
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("material")
    tiny.make_model(directory / "model", seed=0)
    tiny.make_data(directory, seed=0)
    return directory


def _config(material: Path, output: Path, **changes: Any) -> LoadedConfig[Config]:
    data: dict[str, Any] = {
        "model": {"path": str(material / "model")},
        "lora": {"rank": 4},
        "data": {"train": str(material / "train.jsonl"), "eval": str(material / "eval.jsonl"), "eval_rows": 4},
        "rollout": {"num_samples": 4, "max_response_length": 12},
        "reward": {"functions": [{"name": "covey.rewards.rules:format_reward"}, {"name": "math"}]},
        "algorithm": {"kl_coef": 0.01, "epochs": 2, "mini_batch_size": 3, "advantage": "group_center"},
        "train": {"steps": 3, "batch_size": 6, "lr": 1e-2},
        "evaluation": {"every": 3},
        "checkpoint": {"every": 1, "keep_last": 10},
        "preflight": {"skip": {"lengths": "responses are short to be quick"}},
        "output_dir": str(output),
        "device": "cpu",
    }
    for section, values in changes.items():
        data[section] = {**data[section], **values} if isinstance(values, dict) else values
    return LoadedConfig(Config.model_validate(data), {}, "test")


def _metrics(output: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing/", "memory/", "e2e_tps", "update_tps", "vllm_tps", "rollout/generated_tps")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(1, 24)[None]).logits


def _load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def whole_run(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "run"
    train(_config(material, output), quiet=True)
    return output


def test_a_run_samples_what_it_trains_and_learns_by_its_adapter(whole_run: Path) -> None:
    lines = _metrics(whole_run)[1:]
    assert max(line["rollout/logprob_gap_max"] for line in lines) <= 1e-4
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert lines[-1]["actor/kl_loss"] > 1e-3, "away from the base model"
    facts = json.loads((whole_run / "run.json").read_text())["Model"]
    assert facts["reference"] == "the model without the adapter"
    assert facts["adapter"].startswith("rank 4, alpha 8 on ")


def test_the_first_step_starts_at_the_reference(material: Path, tmp_path: Path) -> None:
    """A new adapter adds nothing: policy and reference agree exactly, whatever the weights' numbers."""
    train(
        _config(
            material,
            tmp_path / "run",
            model={"dtype": "bfloat16"},
            train={"steps": 1},
            algorithm={"epochs": 1, "mini_batch_size": None},
        ),
        quiet=True,
    )
    assert _metrics(tmp_path / "run")[1]["actor/kl_loss"] == 0.0


def test_a_checkpoint_holds_the_adapter_alone(whole_run: Path) -> None:
    checkpoint = whole_run / "checkpoints" / "step-000003"
    names = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    weights = {name for name in names if name.startswith("model.")}
    assert weights
    assert all(is_adapter_weight(name) for name in names)
    size = sum(path.stat().st_size for path in checkpoint.glob("*.distcp"))
    assert size < 0.25 * (whole_run / "model" / "model.safetensors").stat().st_size


@pytest.mark.parametrize("step", [1, 2])
def test_a_killed_run_goes_on_bit_for_bit(material: Path, whole_run: Path, tmp_path: Path, step: int) -> None:
    output, name = tmp_path / "run", f"step-{step:06d}"
    shutil.copytree(whole_run / "checkpoints" / name, output / "checkpoints" / name)
    text = (whole_run / "metrics.jsonl").read_text()
    (output / "metrics.jsonl").write_text(text[: int(len(text) * 0.9)])
    train(_config(material, output), resume=True, quiet=True)
    assert _metrics(output) == _metrics(whole_run)
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        resumed, first = load_file(output / file), load_file(whole_run / file)
        assert resumed.keys() == first.keys()
        assert all(torch.equal(resumed[key], first[key]) for key in first), file


def test_a_run_without_lora_does_not_go_on_from_an_adapter(material: Path, whole_run: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_run / "checkpoints", tmp_path / "run" / "checkpoints")
    with pytest.raises(ValueError, match="belongs to another model"):
        train(_config(material, tmp_path / "run", lora=None), resume=True, quiet=True)
    with pytest.raises(ValueError, match="belongs to another model"):
        train(_config(material, tmp_path / "run", lora={"rank": 2}), resume=True, quiet=True)


def test_every_export_is_the_adapted_model(material: Path, whole_run: Path, tmp_path: Path) -> None:
    """OUTPUT/model, OUTPUT/adapter through peft, and both forms of covey export, from the checkpoint's fp32 masters."""
    expected = _logits(PeftModel.from_pretrained(_load(material / "model"), str(whole_run / "adapter")))
    assert float((_logits(_load(material / "model")) - expected).abs().max()) > 0.1
    torch.testing.assert_close(_logits(_load(whole_run / "model")), expected, rtol=0, atol=1e-5)
    merged = export.run(whole_run, tmp_path / "merged")
    assert merged["model"] == str(tmp_path / "merged")
    torch.testing.assert_close(_logits(_load(tmp_path / "merged")), expected, rtol=0, atol=1e-5)
    export.run(whole_run / "checkpoints" / "step-000003", tmp_path / "adapter", adapter=True)
    theirs = PeftModel.from_pretrained(_load(material / "model"), str(tmp_path / "adapter"))
    torch.testing.assert_close(_logits(theirs), expected, rtol=0, atol=1e-6)
    names = set(load_file(tmp_path / "merged" / "model.safetensors"))
    assert names == set(load_file(material / "model" / "model.safetensors"))


def test_an_export_finds_a_model_that_has_moved(material: Path, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    shutil.copytree(material / "model", here)
    config = _config(material, tmp_path / "run", model={"path": str(here)}, train={"steps": 1})
    train(config, quiet=True)
    here.rename(there)
    with pytest.raises(ValueError, match="--base DIR says where that model is now"):
        export.run(tmp_path / "run", tmp_path / "merged")
    export.run(tmp_path / "run", tmp_path / "merged", base=str(there))
    torch.testing.assert_close(
        _logits(_load(tmp_path / "merged")), _logits(_load(tmp_path / "run" / "model")), rtol=0, atol=1e-5
    )


def test_a_run_without_lora_has_no_adapter_to_export(material: Path, tmp_path: Path) -> None:
    train(_config(material, tmp_path / "run", lora=None, train={"steps": 1}), quiet=True)
    assert not (tmp_path / "run" / "adapter").exists()
    message = "has no adapter, its run trained all weights"
    with pytest.raises(ValueError, match=f"--adapter: .*{message}"):
        export.run(tmp_path / "run", tmp_path / "out", adapter=True)
    with pytest.raises(ValueError, match=f"--base: .*{message}"):
        export.run(tmp_path / "run", tmp_path / "out", base="x")


def test_evaluation_of_a_merged_model_is_that_of_its_adapter(material: Path, whole_run: Path, tmp_path: Path) -> None:
    loaded = _config(material, tmp_path / "unused")
    expected = {k: v for k, v in _metrics(whole_run)[-1].items() if k.startswith("eval/")}
    assert expected
    for model in ("model", "adapter"):
        values = evaluate.run(loaded, model=str(whole_run / model))
        assert {k: v for k, v in values.items() if k.startswith("eval/")} == expected
    base = evaluate.run(loaded)  # what training would start from
    first = {k: v for k, v in _metrics(whole_run)[0].items() if k.startswith("eval/")}
    assert {k: v for k, v in base.items() if k.startswith("eval/")} == first


def test_a_run_starts_from_the_adapter_of_another(material: Path, whole_run: Path, tmp_path: Path) -> None:
    adapter = str(whole_run / "adapter")
    train(_config(material, tmp_path / "run", lora={"rank": None, "path": adapter}, train={"steps": 1}), quiet=True)
    last = {k: v for k, v in _metrics(whole_run)[-1].items() if k.startswith("eval/")}
    first = {k: v for k, v in _metrics(tmp_path / "run")[0].items() if k.startswith("eval/")}
    assert first == last
    assert json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())["r"] == 4


def test_a_cold_start_trains_an_adapter(material: Path, tmp_path: Path) -> None:
    data = {
        "model": {"path": str(material / "model")},
        "lora": {"rank": 8},
        "sft": {"data": str(material / "sft.jsonl"), "max_response_length": 64},
        "train": {"steps": 4, "batch_size": 8, "lr": 1e-2},
        "output_dir": str(tmp_path / "run"),
        "device": "cpu",
    }
    summary = sft.run(LoadedConfig(SftRunConfig.model_validate(data), {}, "test"))
    theirs = PeftModel.from_pretrained(_load(material / "model"), summary["adapter"])
    torch.testing.assert_close(_logits(_load(Path(summary["model"]))), _logits(theirs), rtol=0, atol=1e-5)
    losses = [json.loads(line)["sft/loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.1


def test_a_dry_run_counts_an_adapter_and_no_second_model(material: Path, tmp_path: Path) -> None:
    full, lora = (
        dry_run(_config(material, tmp_path / "run", lora=section))
        for section in (None, {"rank": 4, "target_modules": ["q_proj"]})
    )
    assert full["ok"]
    assert lora["ok"]
    config = json.loads((material / "model" / "config.json").read_text())
    trained = config["num_hidden_layers"] * 4 * 2 * config["hidden_size"]  # rank 4, D_in + D_out of q_proj
    assert lora["memory_bytes"]["AdamW moments"] == 8 * trained
    assert "reference" in full["memory_bytes"]
    assert "reference" not in lora["memory_bytes"]
    refused = dry_run(_config(material, tmp_path / "run", lora={"target_modules": ["linear_qkv"]}))
    assert any("lora.target_modules" in problem for problem in refused["problems"])
