"""verl and TRL configurations: recognised, the counterparts set, the rest said."""

from __future__ import annotations

import json
from pathlib import Path

from covey.config.convert import check_file, load_any

VERL = """\
set -x
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=train.parquet \\
    data.train_batch_size=64 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1024 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \\
    +actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    trainer.total_training_steps=100 \\
    trainer.save_freq=20 \\
    trainer.default_local_dir=out $@
"""


def test_a_verl_launch_script_is_read_as_its_overrides(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(VERL)
    loaded = load_any(script)
    config = loaded.config
    assert loaded.dialect == "verl"
    assert (config.train.batch_size, config.algorithm.mini_batch_size, config.rollout.num_samples) == (64, 16, 5)
    assert (config.algorithm.kl_coef, config.algorithm.kl_estimator) == (0.001, "low_var_kl")
    assert config.algorithm.aggregation == "sequence_mean"
    assert (config.train.steps, config.checkpoint.every, config.output_dir) == (100, 20, "out")
    assert loaded.origins["train.lr"] == f"{script}:9"


def test_verl_yaml_with_gae_or_an_unknown_key_cannot_run(tmp_path: Path) -> None:
    path = tmp_path / "verl.yaml"
    path.write_text(
        "algorithm: {adv_estimator: gae}\ndata: {train_files: a, train_batchsize: 3}\n"
        "actor_rollout_ref: {model: {path: m}}\ntrainer: {total_training_steps: 1}\ncritic: {optim: {lr: 1}}\n"
    )
    report = check_file(path)
    assert report.verdict == "cannot"
    findings = {finding.key: finding for finding in report.findings}
    assert findings["algorithm.adv_estimator"].blocking
    assert "nearest known: data.train_batch_size" in findings["data.train_batchsize"].reason
    assert findings["critic.optim.lr"].verdict == "no effect"


def test_trl_arguments_count_responses_and_keep_trls_defaults(tmp_path: Path) -> None:
    path = tmp_path / "grpo.json"
    arguments = {
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 8,
        "max_completion_length": 256,
        "beta": 0.04,
        "loss_type": "dr_grpo",
        "max_steps": 10,
        "output_dir": "out",
    }
    path.write_text(json.dumps(arguments))
    overrides = ["model.path=m", "data.train=d", "reward.functions=[math]"]
    config = load_any(path, overrides).config
    # 8 responses a device x 8 micro-steps = 64 generated = 16 prompts; the optimizer steps on 8 x 4 = 32 = 8 prompts
    assert (config.train.batch_size, config.algorithm.mini_batch_size) == (16, 8)
    assert (config.algorithm.aggregation, config.algorithm.kl_coef) == ("constant", 0.04)
    assert (config.algorithm.advantage, config.algorithm.advantage_eps) == ("group_norm", 1e-4)
    assert (config.train.schedule, config.train.weight_decay, config.train.betas) == ("linear", 0.0, (0.9, 0.999))
    path.write_text(json.dumps({**arguments, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 1}))
    assert check_file(path, [*overrides, "steps_per_generation=1"]).verdict == "cannot"


def test_verls_kl_in_reward_dynamic_sampling_and_overlong_penalty(tmp_path: Path) -> None:
    script = tmp_path / "dapo.sh"
    more = [
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.kl_coef=0.01",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.target_kl=0.2",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.max_num_gen_batches=4",
        "reward_model.overlong_buffer.enable=True",
        "reward_model.overlong_buffer.len=256",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=5",
    ]
    kept = [line for line in VERL.splitlines() if "kl_loss" not in line]
    script.write_text("\n".join([*kept, *more]))
    algorithm = load_any(script).config.algorithm
    assert (algorithm.kl_in_reward, algorithm.kl_coef, algorithm.kl_estimator) == (True, 0.01, "k1")
    assert (algorithm.kl_target, algorithm.kl_horizon, algorithm.max_rounds) == (0.2, 10_000, 4)
    assert (algorithm.overlong_buffer, algorithm.overlong_penalty) == (256, 1.0)
    assert (algorithm.rollout_correction, algorithm.rollout_ratio_high) == ("token_truncate", 5.0)


def test_trl_losses_beyond_grpo(tmp_path: Path) -> None:
    path = tmp_path / "trl.json"
    arguments = {
        "output_dir": "out",
        "loss_type": "cispo",
        "epsilon_high": 5.0,
        "beta": 0.0,
        "num_generations": 4,
        "multi_objective_aggregation": "normalize_then_sum",
        "top_entropy_quantile": 0.2,
        "vespo_k_neg": 4.0,
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
    }
    path.write_text(json.dumps(arguments))
    given = ["model.path=m", "data.train=d.jsonl", "reward.functions=[math]"]
    algorithm = load_any(path, given).config.algorithm
    assert (algorithm.loss, algorithm.aggregation, algorithm.clip_low, algorithm.clip_high) == (
        "cispo",
        "token_mean",
        1.0,
        4.0,  # the largest weight of a token is 5
    )
    assert (algorithm.advantage, algorithm.top_entropy_share, algorithm.vespo_neg) == ("gdpo", 0.2, (4.0, 2.0))
    assert (algorithm.rollout_correction, algorithm.rollout_ratio_high) == ("token_truncate", 3.0)


def test_trls_reference_sync_and_adaptive_entropy(tmp_path: Path) -> None:
    """TRL: ref = alpha policy + (1 - alpha) ref, so that the reference keeps 1 - alpha of itself."""
    path = tmp_path / "trl.json"
    arguments = {
        "output_dir": "out",
        "beta": 0.04,
        "num_generations": 4,
        "sync_ref_model": True,
        "ref_model_mixup_alpha": 0.9,
        "ref_model_sync_steps": 64,
        "use_adaptive_entropy": True,
        "entropy_coef": 0.01,
        "entropy_target": 0.5,
        "entropy_coef_min": 0.0,
    }
    path.write_text(json.dumps(arguments))
    given = ["model.path=m", "data.train=d.jsonl", "reward.functions=[math]"]
    config = load_any(path, given).config
    assert (config.reference.sync_every, config.reference.decay) == (64, 0.1)
    algorithm = config.algorithm
    assert (algorithm.entropy_coef, algorithm.entropy_target) == (0.01, 0.5)
    assert (algorithm.entropy_coef_delta, algorithm.entropy_coef_max) == (0.005, 1.0)
    path.write_text(json.dumps({**arguments, "entropy_coef_min": 0.1}))
    differs = {finding.key for finding in check_file(path, given).findings if finding.differs}
    assert differs == {"entropy_coef_min"}


def test_verls_offloaded_reference_is_offloaded_where_there_is_one(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    more = "actor_rollout_ref.ref.fsdp_config.param_offload=True"
    script.write_text(f"{VERL}{more}\n")
    assert load_any(script).config.reference.offload
    script.write_text(f"{VERL.replace('use_kl_loss=True', 'use_kl_loss=False')}{more}\n")
    assert not load_any(script).config.reference.offload
