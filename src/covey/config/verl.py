"""verl's keys that have a counterpart, one row each, and the reward it scores with. Source: verl 0.10."""

from __future__ import annotations

from typing import Any

from covey.config import lora_keys as lora
from covey.config.rules import (
    Conversion,
    Finding,
    KeyMap,
    Rule,
    built_in,
    honour,
    mapped,
    no_effect,
    number,
    real,
    unsupported,
    whole,
)

_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl"}
_ADVANTAGES = {"grpo": "group_norm", "rloo": "rloo", "reinforce_plus_plus_baseline": "group_center_batch_norm"}
_MEANS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}


def set_reward(given: dict[str, Any], run: Conversion) -> None:
    """verl scores by data_source unless a function is given; Covey asks for a function."""
    path, name = given.get("custom_reward_function.path"), given.get("custom_reward_function.name", "compute_score")
    if path:
        run.set("reward.functions", [{"name": f"{path}:{name}"}], "custom_reward_function.path")
        return
    run.set("reward.functions", [{"name": "math"}], "no custom_reward_function")
    reason = "verl chooses a reward by data_source; here reward.functions is `math` until you name another"
    run.note(Finding("not supported", reason, differs=True), "custom_reward_function.path")


def _choice(native_key: str, names: dict[str, str], *, when: str = "") -> Rule:
    def rule(value: Any, run: Conversion) -> Finding:
        if when and not run.get("verl", when):
            return Finding("no effect", f"{when} is off")
        if value not in names:
            return Finding("not supported", f"known: {', '.join(names)}", blocking=True)
        run.set(native_key, names[value])
        return Finding("honoured", f"{native_key} {names[value]}")

    return rule


def _kl(value: Any, run: Conversion) -> Finding:
    if not run.get("verl", "actor_rollout_ref.actor.use_kl_loss"):
        return Finding("no effect", "use_kl_loss is off")
    run.set("algorithm.kl_coef", number(value))
    if not run.get("verl", "actor_rollout_ref.actor.kl_loss_type"):
        run.set("algorithm.kl_estimator", "low_var_kl")
    return Finding("honoured", "algorithm.kl_coef")


def _reward_kl(value: Any, run: Conversion) -> Finding:
    if not value:
        return Finding("no effect", "switched off")
    if run.get("verl", "actor_rollout_ref.actor.use_kl_loss"):
        return Finding("not supported", "the KL term is in the reward or in the loss, not in both", blocking=True)
    run.set("algorithm.kl_in_reward", True)
    run.set("algorithm.kl_coef", number(run.get("verl", "algorithm.kl_ctrl.kl_coef") or 0.001))
    estimator = run.get("verl", "algorithm.kl_penalty") or "kl"
    if estimator not in _ESTIMATORS:
        return Finding("not supported", f"algorithm.kl_penalty: known: {', '.join(_ESTIMATORS)}", blocking=True)
    run.set("algorithm.kl_estimator", _ESTIMATORS[estimator])
    if run.get("verl", "algorithm.kl_ctrl.type") == "adaptive":
        run.set("algorithm.kl_target", number(run.get("verl", "algorithm.kl_ctrl.target_kl") or 0.1))
        run.set("algorithm.kl_horizon", int(number(run.get("verl", "algorithm.kl_ctrl.horizon") or 10000)))
    return Finding("honoured", "algorithm.kl_in_reward; the response's reward, not each token's")


def _filter(value: Any, run: Conversion) -> Finding:
    if not value:
        return Finding("no effect", "switched off")
    limit = int(number(run.get("verl", "algorithm.filter_groups.max_num_gen_batches") or 0))
    run.set("algorithm.max_rounds", limit if limit > 0 else 10)
    if limit > 0:
        return Finding("honoured", f"algorithm.max_rounds = {limit}; then groups without spread fill the step")
    return Finding("mapped", "algorithm.max_rounds = 10, then groups without spread fill the step", differs=True)


def _overlong(prefix: str) -> Rule:
    def rule(value: Any, run: Conversion) -> Finding:
        length = run.get("verl", f"{prefix}len")
        if not value:
            return Finding("no effect", "switched off")
        if length is None:
            return Finding("not supported", f"{prefix}len is not given", blocking=True)
        run.set("algorithm.overlong_buffer", int(number(length)))
        run.set("algorithm.overlong_penalty", number(run.get("verl", f"{prefix}penalty_factor") or 1.0))
        return Finding("honoured", "algorithm.overlong_buffer and algorithm.overlong_penalty")

    return rule


def _correction(value: Any, run: Conversion) -> Finding:
    if value in (None, "null"):
        return Finding("no effect", "switched off")
    if value not in ("token", "sequence"):
        return Finding("not supported", "known: token, sequence", blocking=True)
    run.set("algorithm.rollout_correction", f"{value}_truncate")
    run.set("algorithm.rollout_ratio_high", number(run.get("verl", f"{_CORRECTION}rollout_is_threshold") or 2.0))
    return Finding("honoured", f"algorithm.rollout_correction {value}_truncate")


def _clip(value: Any, run: Conversion) -> Finding:
    for side in ("low", "high"):
        if run.get("verl", f"actor_rollout_ref.actor.clip_ratio_{side}") is None:
            run.set(f"algorithm.clip_{side}", number(value))
    return Finding("honoured", "algorithm.clip_low and algorithm.clip_high, where no side has its own")


def _mini(value: Any, run: Conversion) -> Finding:
    size, batch = int(number(value)), run.get("verl", "data.train_batch_size")
    if batch is None or size >= int(number(batch)):
        return Finding("mapped", "one optimizer step per rollout")
    run.set("algorithm.mini_batch_size", size)
    return Finding("honoured", "algorithm.mini_batch_size, in prompts")


def _std(value: Any, run: Conversion) -> Finding:
    if run.get("verl", "algorithm.adv_estimator") not in (None, "grpo"):
        return Finding("no effect", "read with adv_estimator grpo")
    run.set("algorithm.advantage", "group_norm" if value else "group_center")
    return Finding("honoured", f"algorithm.advantage {run.native['algorithm.advantage']}")


def _context(value: Any, run: Conversion) -> Finding:
    size = int(number(value))
    if run.world_size == 1:
        return Finding("mapped", "one process is started: nothing is split; the numbers are the same")
    if run.world_size % size:
        return Finding("not supported", f"{size} does not divide the {run.world_size} processes", blocking=True)
    run.set("parallel.cp", size)
    return Finding("honoured", "parallel.cp")


def _loggers(value: Any, run: Conversion) -> Finding:
    names = value if isinstance(value, list) else [value]
    run.set("logging.tensorboard", "tensorboard" in names)
    for name in ("wandb", "swanlab"):
        if name in names:
            run.set(f"logging.{name}_project", str(run.get("verl", "trainer.project_name") or "covey"))
    return Finding("honoured", "logging.*")


def _steps(value: Any, run: Conversion) -> Finding:
    if run.get("verl", "trainer.total_training_steps") is not None:
        return Finding("no effect", "total_training_steps decides")
    return Finding("not supported", "runs are counted in steps: set train.steps (rows x epochs / batch)", differs=True)


_MICRO = no_effect("micro-batches are cut by tokens (train.max_tokens_per_micro_batch)")
_ENGINE = no_effect("a setting of verl's engines; the native one does not need it")
_CORRECTION = "algorithm.rollout_correction."
_OVERLONG = ("reward_model.overlong_buffer.", "reward_model.reward_kwargs.overlong_buffer_cfg.")


def _offload_reference(value: Any, run: Conversion) -> Finding:
    switches = ("actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward")
    if value and any(run.get("verl", switch) for switch in switches) and not lora.verl_is_on(run):
        return honour("reference.offload")(True, run)
    return Finding("no effect", "switched off, or there is no reference of its own")


_A = "actor_rollout_ref.actor."
_R = "actor_rollout_ref.rollout."
IGNORED = {
    "critic.": "GRPO has no critic",
    "reward_model.": "rewards are functions",
    "actor_rollout_ref.ref.": "the reference shares layout and settings with the policy",
    "actor_rollout_ref.actor.fsdp_config.": "layout follows the launched processes",
    "actor_rollout_ref.actor.megatron.": "layout follows the launched processes",
    "ray_kwargs.": "no Ray",
    "ray_init.": "no Ray",
    "transfer_queue.": "no Ray",
    "global_profiler.": "verl's profiler",
}
VERL: KeyMap = {
    "data.train_files": honour("data.train", why="set data.response_key to the column of the reference answer"),
    "data.val_files": mapped(
        "data.eval", "the first of them", convert=lambda v: v[0] if isinstance(v, list) and v else v
    ),
    "data.train_batch_size": whole("train.batch_size"),
    "data.max_prompt_length": whole("data.max_prompt_length"),
    "data.max_response_length": whole("rollout.max_response_length"),
    "data.prompt_key": honour("data.prompt_key"),
    "data.shuffle": honour("data.shuffle"),
    "data.seed": whole("seed"),
    "data.filter_overlong_prompts": built_in("longer prompts are always dropped and counted"),
    "data.truncation": no_effect("longer prompts are dropped, never cut (data.overlong_prompts)"),
    "data.reward_fn_key": no_effect("every column reaches the reward functions"),
    "data.trust_remote_code": no_effect("set model.trust_remote_code to run a model's own code"),
    "actor_rollout_ref.hybrid_engine": built_in("training and rollout share the devices"),
    "actor_rollout_ref.model.path": honour("model.path"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": honour("model.gradient_checkpointing"),
    "actor_rollout_ref.model.use_remove_padding": built_in("sequences are packed, never padded"),
    "actor_rollout_ref.model.use_fused_kernels": built_in("logits are never held whole"),
    "actor_rollout_ref.model.trust_remote_code": honour("model.trust_remote_code"),
    **lora.VERL_LORA,
    f"{_A}strategy": no_effect("layout follows the launched processes"),
    f"{_A}optim.lr": real("train.lr"),
    f"{_A}optim.lr_warmup_steps": lambda value, run: (
        whole("train.warmup_steps")(value, run) if number(value) > 0 else Finding("no effect", "not positive: off")
    ),
    f"{_A}optim.lr_warmup_steps_ratio": real("train.warmup_fraction"),
    f"{_A}optim.weight_decay": real("train.weight_decay"),
    f"{_A}optim.betas": honour("train.betas"),
    f"{_A}optim.warmup_style": _choice("train.schedule", {"constant": "constant", "cosine": "cosine"}),
    f"{_A}optim.lr_scheduler_type": _choice("train.schedule", {"constant": "constant", "cosine": "cosine"}),
    f"{_A}grad_clip": real("train.max_grad_norm"),
    f"{_A}ppo_mini_batch_size": _mini,
    f"{_A}ppo_micro_batch_size": _MICRO,
    f"{_A}ppo_micro_batch_size_per_gpu": _MICRO,
    f"{_A}use_dynamic_bsz": built_in("micro-batches are cut by tokens"),
    f"{_A}ppo_max_token_len_per_gpu": whole("train.max_tokens_per_micro_batch"),
    f"{_A}clip_ratio": _clip,
    f"{_A}clip_ratio_low": real("algorithm.clip_low"),
    f"{_A}clip_ratio_high": real("algorithm.clip_high"),
    f"{_A}clip_ratio_c": real("algorithm.dual_clip"),
    f"{_A}policy_loss.loss_mode": _choice("algorithm.loss", {"vanilla": "grpo", "gspo": "gspo", "cispo": "cispo"}),
    f"{_A}use_kl_loss": built_in("on when algorithm.kl_coef is not 0"),
    f"{_A}kl_loss_coef": _kl,
    f"{_A}kl_loss_type": _choice("algorithm.kl_estimator", _ESTIMATORS, when=f"{_A}use_kl_loss"),
    f"{_A}entropy_coeff": real("algorithm.entropy_coef"),
    f"{_A}loss_agg_mode": _choice("algorithm.aggregation", _MEANS),
    f"{_A}ppo_epochs": whole("algorithm.epochs"),
    f"{_A}ulysses_sequence_parallel_size": _context,
    f"{_A}shuffle": no_effect("the order of prompts is drawn anew every epoch"),
    f"{_R}name": no_effect("the native engine samples, on the training weights"),
    f"{_R}n": whole("rollout.num_samples"),
    f"{_R}temperature": real("rollout.temperature"),
    f"{_R}top_p": real("rollout.top_p"),
    f"{_R}top_k": mapped("rollout.top_k", "-1 means all, 0 here", convert=lambda v: max(int(number(v)), 0)),
    f"{_R}max_num_seqs": whole("rollout.max_num_seqs"),
    f"{_R}tensor_model_parallel_size": no_effect("rollout runs on the training weights, split as they are"),
    f"{_R}gpu_memory_utilization": no_effect("the native engine's cache is limited by rollout.kv_cache_bytes"),
    f"{_R}val_kwargs.n": whole("evaluation.num_samples"),
    f"{_R}val_kwargs.temperature": real("evaluation.temperature"),
    **{
        f"{_R}{name}": _ENGINE
        for name in (
            "dtype", "enforce_eager", "free_cache_engine", "max_num_batched_tokens", "enable_chunked_prefill",
            "max_model_len", "load_format", "mode", "ignore_eos", "calculate_log_probs", "val_kwargs.do_sample",
            "val_kwargs.top_p", "val_kwargs.top_k", "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu",
            "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu", "layered_summon",
        )
    },
    "actor_rollout_ref.ref.fsdp_config.param_offload": _offload_reference,
    "algorithm.adv_estimator": _choice("algorithm.advantage", _ADVANTAGES),
    "algorithm.norm_adv_by_std_in_grpo": _std,
    "algorithm.use_kl_in_reward": _reward_kl,
    "algorithm.kl_penalty": no_effect("read with use_kl_in_reward"),
    **{f"algorithm.kl_ctrl.{k}": no_effect("read with use_kl_in_reward") for k in ("type", "horizon", "target_kl")},
    "algorithm.filter_groups.enable": _filter,
    "algorithm.filter_groups.metric": no_effect("groups must differ in their total reward"),
    "algorithm.filter_groups.max_num_gen_batches": no_effect("read with algorithm.filter_groups.enable"),
    f"{_CORRECTION}rollout_is": _correction,
    f"{_CORRECTION}rollout_is_threshold": no_effect("read with rollout_is"),
    f"{_CORRECTION}rollout_rs": unsupported("masks of another kind: see algorithm.rollout_correction", off=(None,)),
    **{f"{prefix}enable": _overlong(prefix) for prefix in _OVERLONG},
    **{
        f"{prefix}{key}": no_effect("read with overlong_buffer's enable")
        for prefix in _OVERLONG
        for key in ("len", "penalty_factor", "log")
    },
    **{f"algorithm.{key}": no_effect("GRPO has no returns to discount or weigh") for key in ("gamma", "lam")},
    "algorithm.kl_ctrl.kl_coef": no_effect("read with use_kl_in_reward"),
    "custom_reward_function.path": built_in("reward.functions"),
    "custom_reward_function.name": built_in("reward.functions"),
    "trainer.total_training_steps": whole("train.steps"),
    "trainer.total_epochs": _steps,
    "trainer.save_freq": lambda value, run: (
        whole("checkpoint.every")(value, run) if number(value) > 0 else Finding("no effect", "not positive: off")
    ),
    "trainer.test_freq": lambda value, run: (
        whole("evaluation.every")(value, run) if number(value) > 0 else Finding("no effect", "not positive: off")
    ),
    "trainer.default_local_dir": honour("output_dir"),
    "trainer.project_name": no_effect("used for the loggers that are switched on"),
    "trainer.experiment_name": no_effect("runs are named after output_dir"),
    "trainer.logger": _loggers,
    "trainer.n_gpus_per_node": no_effect("processes are started by torchrun"),
    "trainer.nnodes": no_effect("processes are started by torchrun"),
    "trainer.device": no_effect("device: auto"),
    "trainer.critic_warmup": no_effect("GRPO has no critic"),
    "trainer.val_before_train": built_in("an evaluation comes first when evaluation.every is set"),
    "trainer.resume_mode": no_effect("covey train --resume"),
    "trainer.max_actor_ckpt_to_keep": whole("checkpoint.keep_last"),
}  # fmt: skip
