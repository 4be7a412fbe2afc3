"""MindSpeed-RL's keys outside Megatron, one row each: rl_config, generate_config, sampling_config, environment.

Rows that need more than one key stand in mindspeed_rules.py. Dashes in keys equal underscores.
"""

from __future__ import annotations

import os
from typing import Any

from covey.config import lora_keys as lora
from covey.config import mindspeed_dapo as dapo
from covey.config import mindspeed_rules as rules
from covey.config.rules import (
    Conversion,
    Finding,
    KeyMap,
    built_in,
    honour,
    judged_with,
    no_effect,
    number,
    only,
    unsupported,
)

VERIFIERS = (
    "acc", "format", "step", "strict_format", "base_acc", "math_17k_acc", "math_verify_reward", "acc_for_dapo",
    "acc_for_ppo",
)  # fmt: skip

# What upstream takes for an absent key, where Covey's own default is another. Its sampling defaults (temperature 0.2,
# top_k 50, one sequence at a time) are not taken over: they are reported by convert.py.
DEFAULTS: dict[str, dict[str, Any]] = {
    "megatron_training": {
        "seed": 1234, "weight_decay": 0.01, "clip_grad": 1.0, "adam_beta1": 0.9, "adam_beta2": 0.999,
        "lr_decay_style": "linear", "min_lr": 0.0, "micro_batch_size": 1, "stage": "ray_grpo",
        "context_parallel_algo": "ulysses_cp_algo",
    },
    "rl_config": {
        "n_samples_per_prompt": 1, "max_prompt_length": 512, "epochs": 1, "clip_ratio": 0.2, "entropy_coeff": 0.0,
        "kl_penalty": "low_var_kl", "init_kl_coef": 0.01, "verifier_function": ["base_acc"], "verifier_weight": [1.0],
        "mini_batch_size": 1, "token_level_loss": True, "clip_ratio_low": 0.1, "clip_ratio_high": 0.1,
        "filter_groups_max_batches": -1, "overlong_buffer_penalty_factor": 1.0,
    },
    "sampling_config": {"max_tokens": 128},
}  # fmt: skip


_RAY = no_effect("one program on every rank: no data passes through Ray actors")
_MULTI_TURN = judged_with("multi_turn_enable")
_CRITIC = no_effect("belongs to the critic of PPO")
_MULTIMODAL = unsupported("multimodal models are not trained", blocking=True)
_SHARED = no_effect("all models share the actor's devices")
_MICRO = no_effect("one token budget, train.max_tokens_per_micro_batch, for all passes")
_OLD = no_effect("placement and chunk sizes of the schema before mid 2025")
_ENGINE = no_effect("a setting of upstream's engine; the native one does not need it")


def _num_npus(value: Any, run: Conversion) -> Finding:
    count = value.get("num_npus") if isinstance(value, dict) else None
    if count is None:
        return Finding("not supported", "expected a map with num_npus", differs=True)
    if int(number(count)) == run.world_size:
        return Finding("verified", f"{run.world_size} processes are started")
    return Finding(
        "mapped", f"{run.world_size} processes are started, not {count}: the numbers are the same, the speed is not"
    )


def _project(native_key: str, switch: str) -> Any:
    def rule(value: Any, run: Conversion) -> Finding:
        if not run.get("rl_config", switch):
            return Finding("no effect", f"{switch} is off")
        run.set(native_key, str(value))
        return Finding("honoured", native_key)

    return rule


def _switch(native_key: str, project: str) -> Any:
    def rule(value: Any, run: Conversion) -> Finding:
        if not value:
            return Finding("honoured", "off")
        run.set(native_key, str(run.get("rl_config", project) or "covey"))
        return Finding("honoured", native_key)

    return rule


def _integrated_mode(value: Any, run: Conversion) -> Finding:
    path = value.get("ref_model_load_path") if isinstance(value, dict) else None
    if path:
        run.set("model.ref_path", str(path))
    return Finding("honoured", "model.ref_path")


RL: KeyMap = {
    "algorithm": rules.stage,
    "use_integrated_worker": built_in("training and rollout share the devices"),
    "blocking": built_in("the phases of a step follow one another"),
    "async_engine": no_effect("the native engine always batches continuously"),
    "actor_resource": _num_npus,
    **{f"{name}_resource": _SHARED for name in ("reference", "reward", "critic", "vit")},
    "runtime_env_path": judged_with("the variables of that file"),
    "hccl_buffersize": lambda value, run: _export("HCCL_BUFFSIZE", value, run),
    "adv_estimator": rules.adv_estimator,
    "gamma": no_effect("discounts returns of a critic; GRPO has neither, here as upstream"),
    "lam": no_effect("weighs returns of a critic; GRPO has neither, here as upstream"),
    "advantage_whiten": no_effect("no use upstream"),
    "beta": no_effect("no use upstream"),
    "num_samples_per_step": no_effect("no use upstream"),
    "tp_split_expert": no_effect("no use upstream"),
    "kl_penalty": rules.kl_penalty,
    "kl_ctrl_type": rules.kl_ctrl_type,
    "init_kl_coef": rules.kl_coef,
    "kl_horizon": judged_with("kl_ctrl_type"),
    "kl_target": judged_with("kl_ctrl_type"),
    "use_kl_in_reward": no_effect("as upstream: PPO alone reads it; here algorithm.kl_in_reward does it for any loss"),
    "clip_ratio": rules.clip_ratio,
    "clip_param": rules.clip_ratio,
    "cliprange_value": _CRITIC,
    "entropy_coeff": honour("algorithm.entropy_coef", scale=number),
    "epochs": honour("algorithm.epochs", scale=lambda v: int(number(v))),
    "mini_batch_size": rules.mini_batch_size,
    "n_samples_per_prompt": honour("rollout.num_samples", scale=lambda v: int(number(v))),
    "max_prompt_length": rules.max_prompt_length,
    "shuffle_mini_batch": unsupported("mini-batches follow the order of the prompts, which data.shuffle draws anew"),
    "shuffle_minibatch": unsupported("mini-batches follow the order of the prompts, which data.shuffle draws anew"),
    "actor_forward_micro_batch_size": _MICRO,
    "ref_forward_micro_batch_size": _MICRO,
    "vit_forward_micro_batch_size": _MULTIMODAL,
    "update_micro_batch_size": rules.micro_batch_size,
    "rule_reward": rules.rule_reward,
    "verifier_function": rules.verifiers(VERIFIERS),
    "verifier_weight": judged_with("verifier_function"),
    "verifier_parallel": honour(
        "reward.num_workers", scale=lambda v: int(number(v)), why="upstream has not read it since 2025-05"
    ),
    "verifier_timeout": honour("reward.timeout_s", scale=number, why="upstream has not read it since 2025-05"),
    "use_remove_padding": built_in("sequences are packed, never padded"),
    "use_dynamic_bsz": built_in("micro-batches are cut by tokens"),
    "use_dp_batch_balance": built_in("micro-batches are cut by tokens"),
    "max_packing_token_size": rules.packing_tokens,
    "update_max_packing_token_size": rules.packing_tokens,
    "actor_max_packing_token_size": rules.packing_tokens,
    "ref_max_packing_token_size": rules.packing_tokens,
    **{f"{name}dynamic_max_batch_size": _MICRO for name in ("", "ref_", "actor_", "update_")},
    "partial_rollout_max_split": unsupported("a rollout is finished before its update", off=(1, None)),
    "require_max_age_all_finished": judged_with("partial_rollout_max_split"),
    "guarantee_order": built_in("responses always keep the order of their prompts"),
    "data_strategy": _RAY,
    "transfer_queue_data_shard_num": _RAY,
    "transfer_queue_data_shard_port_base": _RAY,
    "zmq_communication": _RAY,
    **{
        f"{name}_dispatch_size": _RAY
        for name in (
            "rollout", "logprob", "ref", "reward", "adv", "actor_logprob", "actor_update", "critic_update",
            "critic_value", "kl", "dynamic_sampling", "image_embeds", "ref_logprob",
        )
    },
    "num_cpus_for_local_task": _RAY,
    "num_cpus_for_placement_group": _RAY,
    "log_max_throughput": rules.log_max_throughput,
    "use_tensorboard": honour("logging.tensorboard", scale=bool),
    "use_wandb": _switch("logging.wandb_project", "wandb_project"),
    "wandb_project": _project("logging.wandb_project", "use_wandb"),
    "wandb_exp_name": no_effect("runs are named after output_dir"),
    "wandb_save_dir": no_effect("everything of a run lies in output_dir"),
    "use_swanlab": _switch("logging.swanlab_project", "swanlab_project"),
    "swanlab_project": _project("logging.swanlab_project", "use_swanlab"),
    "swanlab_mode": no_effect("the package's own environment variables decide"),
    "swanlab_exp_name": no_effect("runs are named after output_dir"),
    "swanlab_save_dir": no_effect("everything of a run lies in output_dir"),
    "integrated_mode_config": _integrated_mode,
    "share_backbone": lora.mindspeed_share_backbone,
    "token_level_loss": dapo.token_level_loss,
    "clip_higher_enable": judged_with("clip_ratio_low and clip_ratio_high"),
    "clip_ratio_low": dapo.clip_side("algorithm.clip_low"),
    "clip_ratio_high": dapo.clip_side("algorithm.clip_high"),
    "overlong_buffer_enable": dapo.overlong_switch,
    "overlong_buffer": dapo.overlong_buffer,
    "overlong_buffer_penalty_factor": judged_with("overlong_buffer"),
    "rollout_max_tokens": dapo.overlong_limit,
    "filter_groups_enable": dapo.filter_groups,
    "filter_groups_metric": dapo.filter_metric,
    "filter_groups_max_batches": judged_with("filter_groups_enable"),
    "filter_groups_train_batch_size": dapo.filter_batch,
    "multi_turn_enable": unsupported("tool calls in several turns", blocking=True),
    "tool_config_path": _MULTI_TURN,
    "max_tool_calls": _MULTI_TURN,
    "max_parallel_calls": _MULTI_TURN,
    "max_total_response_length": _MULTI_TURN,
    "max_tool_response_length": _MULTI_TURN,
    "tool_response_truncate_side": _MULTI_TURN,
    "tool_parser_format": _MULTI_TURN,
    "is_multimodal": _MULTIMODAL,
    "reuse_image_embeds": _MULTIMODAL,
    "colocate_actor_and_vit": _MULTIMODAL,
    "experience_count": _OLD,
    "colocate_actor_ref": _OLD,
    "colocate_all_models": _OLD,
}  # fmt: skip

GENERATE: KeyMap = {
    "trust_remote_code": no_effect(
        "models are built by transformers; set model.trust_remote_code to run their own code"
    ),
    "offload_train_optimizer": no_effect(
        "rollout runs on the training weights: there is no second copy to make room for"
    ),
    "offload_train_grad": no_effect("rollout runs on the training weights: there is no second copy to make room for"),
    "offload_train_param": no_effect("rollout runs on the training weights: there is no second copy to make room for"),
    "infer_tensor_parallel_size": no_effect("rollout runs on the training weights, split as they are"),
    "infer_pipeline_parallel_size": no_effect("rollout runs on the training weights, split as they are"),
    "infer_expert_parallel_size": no_effect("rollout runs on the training weights, split as they are"),
    "data_parallel_size": no_effect("rollout runs on the training weights, split as they are"),
    "max_num_seqs": honour("rollout.max_num_seqs", scale=lambda v: int(number(v))),
    "max_model_len": rules.max_model_len,
    "max_num_batched_tokens": no_effect("the native engine prefills whole prompts"),
    "dtype": only("bfloat16", "rollout computes in the model's numbers"),
    "gpu_memory_utilization": no_effect("the native engine's cache is limited by rollout.kv_cache_bytes"),
    "enforce_eager": _ENGINE,
    "torchair_graph": _ENGINE,
    "enable_prefix_caching": built_in("the responses of a group share their prompt's cache"),
    "enable_chunked_prefill": _ENGINE,
    "enable_expert_parallel": _ENGINE,
    "eplb_token_collects": _ENGINE,
    "eplb_token_save_path": _ENGINE,
    "expert_map_path": _ENGINE,
    "ascend_scheduler_config_enabled": _ENGINE,
    "num_scheduler_steps": no_effect("no use upstream"),
    "tokenizer_name_or_path": no_effect("the tokenizer of training is used"),
    "limit_mm_image_per_prompt": _MULTIMODAL,
    "limit_mm_video_per_prompt": _MULTIMODAL,
    "micro_batch_size": _OLD,
}

SAMPLING: KeyMap = {
    "max_tokens": honour("rollout.max_response_length", scale=lambda v: int(number(v))),
    "temperature": rules.sampling("rollout.temperature", 1.0),
    "top_p": rules.sampling("rollout.top_p", 1.0),
    "top_k": rules.sampling("rollout.top_k", 0, off=-1),
    "min_p": rules.sampling("rollout.min_p", 0.0),
    "logprobs": built_in("log-probabilities of the rollout are always kept and compared with training"),
    "detokenize": no_effect("rewards read text, the update reads ids"),
    "seed": no_effect("sampling follows `seed`"),
    "n": no_effect("rl_config.n_samples_per_prompt decides"),
}


def environment_variable(name: str, value: Any, run: Conversion) -> Finding:
    """One variable of runtime_env, exported as text before torch_npu or vLLM is imported."""
    if name.startswith("RAY_") or name == "HYDRA_FULL_ERROR":
        return Finding("no effect", "neither Ray nor Hydra is used")
    if name == "COC_ENABLED":
        wanted = value not in (False, "false", "0", 0)
        reason = (
            "no program reads this variable; it means use_ascend_coc, overlap of communication in tensor parallelism"
        )
        return Finding("not supported" if wanted else "no effect", f"{reason}: not available", differs=wanted)
    return _export(name, value, run)


def _export(name: str, value: Any, run: Conversion) -> Finding:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    already = os.environ.get(name)
    if already is not None and already != text:
        return Finding("no effect", f"the environment already has {name}={already}, which stays")
    run.environment[name] = text
    return Finding("honoured", f"exported as {name}={text}")
