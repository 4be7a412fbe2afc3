"""LoRA keys of other programs: names of layers, what switches it on, and each one's defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from covey.config.convert import Report, check_file, load_any
from covey.config.lora import LoraConfig

MINDSPEED: dict[str, Any] = {
    "megatron_training": {
        "stage": "ray_grpo",
        "tokenizer_name_or_path": "./model",
        "global_batch_size": 32,
        "train_iters": 5,
        "data_path": "./rows.jsonl",
    },
    "actor_config": {"lr": "1e-6", "save": "./out"},
    "rl_config": {"n_samples_per_prompt": 8, "verifier_function": ["acc"], "verifier_weight": [1.0]},
    "generate_config": {"sampling_config": {"max_tokens": 512}},
}


def _mindspeed(tmp_path: Path, share_backbone: bool | None = None, **keys: Any) -> Report:
    data = json.loads(json.dumps(MINDSPEED))
    data["megatron_training"] |= keys
    if share_backbone is not None:
        data["rl_config"]["share_backbone"] = share_backbone
    path = tmp_path / "upstream.yaml"
    path.write_text(yaml.safe_dump(data))
    return check_file(path)


def _lora(report: Report) -> LoraConfig | None:
    assert report.loaded is not None, report.findings
    return report.loaded.config.lora


def _verdicts(report: Report) -> dict[str, str]:
    return {finding.key.rpartition(".")[2]: finding.verdict for finding in report.findings}


def test_megatron_core_names_become_hugging_faces(tmp_path: Path) -> None:
    report = _mindspeed(tmp_path, lora_r=128, lora_alpha=64, lora_target_modules=["linear_fc2", "linear_qkv"])
    lora = _lora(report)
    assert lora is not None
    assert (lora.rank, lora.alpha) == (128, 64)
    assert lora.target_modules == ["down_proj", "q_proj", "k_proj", "v_proj"]


def test_all_four_layers_of_mindspeed_are_the_default_layers_here(tmp_path: Path) -> None:
    lora = _lora(_mindspeed(tmp_path, lora_target_modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]))
    assert lora is not None
    assert set(lora.target_modules or []) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert (lora.rank, lora.alpha) == (8, 16), "MindSpeed-RL's defaults"


def test_lora_r_alone_switches_nothing_on_as_upstream(tmp_path: Path) -> None:
    report = _mindspeed(tmp_path, lora_r=8, share_backbone=True)
    assert _lora(report) is None
    verdicts = _verdicts(report)
    assert verdicts["lora_r"] == verdicts["share_backbone"] == "no effect"


def test_share_backbone_is_honoured_with_lora(tmp_path: Path) -> None:
    targets = ["linear_proj"]
    assert _verdicts(_mindspeed(tmp_path, True, lora_target_modules=targets))["share_backbone"] == "honoured"
    assert _verdicts(_mindspeed(tmp_path, False, lora_target_modules=targets))["share_backbone"] == "mapped"


def test_an_unknown_layer_is_an_obstacle(tmp_path: Path) -> None:
    report = _mindspeed(tmp_path, lora_target_modules=["linear_q"])
    assert report.verdict == "cannot"
    assert any("linear_qkv, linear_proj, linear_fc1, linear_fc2" in finding.reason for finding in report.findings)


VERL = """\
algorithm.adv_estimator=grpo
data.train_files=train.parquet
actor_rollout_ref.model.path=m
actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.ref.fsdp_config.param_offload=True
trainer.default_local_dir=out
"""


def _verl(tmp_path: Path, *keys: str) -> Any:
    script = tmp_path / "run.sh"
    script.write_text(VERL + "".join(f"actor_rollout_ref.model.{key}\n" for key in keys))
    return load_any(script).config


def test_verls_rank_switches_lora_on(tmp_path: Path) -> None:
    assert _verl(tmp_path, "lora_rank=0", "lora_alpha=32", "target_modules=all-linear").lora is None
    config = _verl(tmp_path, "lora_rank=32", "target_modules=all-linear")
    assert (config.lora.rank, config.lora.alpha, config.lora.target_modules) == (32, 16, None)
    assert not config.reference.offload, "the reference is the policy without its adapter"


def test_verls_modules_and_adapter(tmp_path: Path) -> None:
    config = _verl(tmp_path, "lora_rank=8", "lora_alpha=64", "target_modules=[q_proj,v_proj]", "lora_adapter_path=a/b")
    assert config.lora == LoraConfig(rank=8, alpha=64, target_modules=["q_proj", "v_proj"], path="a/b")


def _trl(tmp_path: Path, **keys: Any) -> Report:
    path = tmp_path / "trl.json"
    path.write_text(json.dumps({"output_dir": "out", "beta": 0.04, "num_generations": 4, **keys}))
    return check_file(path, ["model.path=m", "data.train=d.jsonl", "reward.functions=[math]"])


def test_trls_adapter_has_peft_defaults(tmp_path: Path) -> None:
    """TRL gives peft no modules then, and peft adapts q_proj and v_proj of Llama and Qwen models."""
    assert _lora(_trl(tmp_path, use_peft=False, lora_r=4)) is None
    assert _lora(_trl(tmp_path, use_peft=True)) == LoraConfig(rank=16, alpha=32, target_modules=["q_proj", "v_proj"])
    given = _trl(tmp_path, use_peft=True, lora_r=4, lora_alpha=4, lora_target_modules=["all-linear"])
    assert _lora(given) == LoraConfig(rank=4, alpha=4)


def test_trls_dropout_and_other_kinds_are_counted_as_differences(tmp_path: Path) -> None:
    report = _trl(tmp_path, use_peft=True, lora_dropout=0.05, use_dora=True, load_in_4bit=True, use_rslora=False)
    assert {f.key for f in report.findings if f.differs} == {"lora_dropout", "use_dora", "load_in_4bit"}
