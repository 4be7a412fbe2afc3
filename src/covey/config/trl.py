"""TRL's GRPOConfig arguments that have a counterpart, one row each. Source: TRL 1.16."""

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


def _batch(value: Any, run: Conversion) -> Finding:
    """per_device_train_batch_size counts responses; the optimizer's batch is that times accumulation and processes."""
    samples = int(number(run.values["trl"].get("num_generations", 8)))
    accumulation = int(number(run.values["trl"].get("gradient_accumulation_steps", 1)))
    per_step = int(number(value)) * run.world_size
    steps = int(number(run.values["trl"].get("steps_per_generation") or accumulation))
    generated = int(number(run.values["trl"].get("generation_batch_size") or per_step * steps))
    optimized = per_step * accumulation
    if generated % samples or optimized % samples:
        return Finding(
            "not supported", f"{generated} or {optimized} responses are no whole groups of {samples}", blocking=True
        )
    run.set("train.batch_size", generated // samples)
    if optimized < generated:
        run.set("algorithm.mini_batch_size", optimized // samples)
    return Finding("mapped", f"train.batch_size = {generated // samples} prompts ({generated} responses / {samples})")


def _max_steps(value: Any, run: Conversion) -> Finding:
    run.set("train.steps", int(number(value)))
    return Finding("honoured", "train.steps; equal while one rollout is one optimizer step")


_LOSSES = {  # loss_type -> loss, mean
    "grpo": ("grpo", "sequence_mean"),
    "bnpo": ("grpo", "token_mean"),
    "dapo": ("grpo", "token_mean"),
    "dr_grpo": ("grpo", "constant"),
    "luspo": ("grpo", "sequence_sum"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "sequence_mean"),
    "vespo": ("vespo", "token_mean"),
}


def _loss(value: Any, run: Conversion) -> Finding:
    if value not in _LOSSES:
        return Finding("not supported", f"known: {', '.join(_LOSSES)}", blocking=True)
    loss, mean = _LOSSES[value]
    run.set("algorithm.loss", loss)
    run.set("algorithm.aggregation", mean)
    return Finding("mapped", f"algorithm.loss {loss}, algorithm.aggregation {mean}")


def _vespo(side: str) -> Rule:
    def rule(value: Any, run: Conversion) -> Finding:
        names = [f"vespo_k_{side}", f"vespo_lambda_{side}"]
        pair = {**DEFAULT_VESPO, **{n: v for n, v in run.values["trl"].items() if n in names}}
        run.set(f"algorithm.vespo_{side}", [number(pair[name]) for name in names])
        return Finding("honoured", f"algorithm.vespo_{side}")

    return rule


def _correction(value: Any, run: Conversion) -> Finding:
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    if not run.values["trl"].get("use_vllm") or run.values["trl"].get("vllm_importance_sampling_correction") is False:
        return Finding("no effect", "belongs to use_vllm with vllm_importance_sampling_correction")
    if value not in modes:
        return Finding("not supported", f"known: {', '.join(modes)}", blocking=True)
    run.set("algorithm.rollout_correction", value)
    for name, native in (("clip_max", "rollout_ratio_high"), ("clip_min", "rollout_ratio_low")):
        bound = run.values["trl"].get(f"vllm_importance_sampling_{name}", 3.0 if name == "clip_max" else None)
        if bound is not None:
            run.set(f"algorithm.{native}", number(bound))
    return Finding("honoured", f"algorithm.rollout_correction {value}")


def _objectives(value: Any, run: Conversion) -> Finding:
    if value == "normalize_then_sum":
        run.set("algorithm.advantage", "gdpo")
        return Finding("honoured", "algorithm.advantage gdpo")
    return Finding("honoured", "rewards are summed, then compared within the group")


def _scale(value: Any, run: Conversion) -> Finding:
    names = {
        "group": "group_norm",
        True: "group_norm",
        "batch": "batch_std",
        "none": "group_center",
        False: "group_center",
    }
    if value not in names:
        return Finding("not supported", "known: group, batch, none", blocking=True)
    run.set("algorithm.advantage", names[value])
    run.set("algorithm.advantage_eps", 1e-4)
    return Finding("mapped", f"algorithm.advantage {names[value]}, eps 1e-4 as in TRL")


def _clip(value: Any, run: Conversion) -> Finding:
    if run.values["trl"].get("loss_type") == "cispo":
        return Finding("no effect", "loss_type cispo reads epsilon_high alone")
    run.set("algorithm.clip_low", number(value))
    if run.values["trl"].get("epsilon_high") is None:
        run.set("algorithm.clip_high", number(value))
    return Finding("honoured", "algorithm.clip_low, and algorithm.clip_high without epsilon_high")


def _clip_high(value: Any, run: Conversion) -> Finding:
    if run.values["trl"].get("loss_type") != "cispo":
        return real("algorithm.clip_high")(value, run)
    run.set("algorithm.clip_low", 1.0)
    run.set("algorithm.clip_high", number(value) - 1)
    return Finding("mapped", "algorithm.clip_high = epsilon_high - 1: cispo gives the largest weight itself")


def _sync_reference(value: Any, run: Conversion) -> Finding:
    if not value:
        return Finding("no effect", "switched off")
    steps = int(number(run.values["trl"].get("ref_model_sync_steps", 512)))
    run.set("reference.sync_every", steps)
    run.set("reference.decay", round(1.0 - number(run.values["trl"].get("ref_model_mixup_alpha", 0.6)), 12))
    why = "1 - ref_model_mixup_alpha; equal while one rollout is one optimizer step"
    return Finding(
        "mapped", f"reference.sync_every = {steps}, reference.decay = {run.native['reference.decay']}: {why}"
    )


def _adaptive_entropy(value: Any, run: Conversion) -> Finding:
    if not value:
        return Finding("no effect", "switched off")
    for name, default in (("entropy_target", 0.2), ("entropy_coef_delta", 0.005), ("entropy_coef_max", 1.0)):
        run.set(f"algorithm.{name}", number(run.values["trl"].get(name, default)))
    return Finding(
        "mapped", "algorithm.entropy_target and its keys; changes after a step, TRL's after an optimizer step"
    )


def _beta(index: int) -> Rule:
    def rule(value: Any, run: Conversion) -> Finding:
        betas = [
            number(run.values["trl"].get(name, default))
            for name, default in (("adam_beta1", 0.9), ("adam_beta2", 0.999))
        ]
        betas[index] = number(value)
        run.set("train.betas", betas)
        return Finding("honoured", f"train.betas[{index}]")

    return rule


DEFAULT_VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-6, "use_bias_correction_kl": True,
    "num_generations": 8, "max_completion_length": 512, "temperature": 1.0, "beta": 0.0,
    "epsilon": 0.2, "loss_type": "dapo", "scale_rewards": "group", "weight_decay": 0.0, "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear", "seed": 42, "adam_beta1": 0.9, "adam_beta2": 0.999, "per_device_train_batch_size": 8,
}  # fmt: skip
TRL: KeyMap = {
    "output_dir": honour("output_dir"),
    "learning_rate": real("train.lr"),
    "num_generations": whole("rollout.num_samples"),
    "max_completion_length": whole("rollout.max_response_length"),
    "max_prompt_length": whole("data.max_prompt_length"),
    "temperature": real("rollout.temperature"),
    "top_p": real("rollout.top_p"),
    "top_k": whole("rollout.top_k"),
    "min_p": real("rollout.min_p"),
    "beta": real("algorithm.kl_coef"),
    "epsilon": _clip,
    "epsilon_high": _clip_high,
    "num_iterations": whole("algorithm.epochs"),
    "loss_type": _loss,
    "scale_rewards": _scale,
    "mask_truncated_completions": honour("algorithm.mask_truncated"),
    "per_device_train_batch_size": _batch,
    "gradient_accumulation_steps": no_effect("read with per_device_train_batch_size"),
    "steps_per_generation": no_effect("read with per_device_train_batch_size"),
    "generation_batch_size": no_effect("read with per_device_train_batch_size"),
    "max_steps": _max_steps,
    "num_train_epochs": unsupported("runs are counted in steps: set train.steps"),
    "weight_decay": real("train.weight_decay"),
    "max_grad_norm": real("train.max_grad_norm"),
    "lr_scheduler_type": lambda value, run: (
        honour("train.schedule")(str(value).removesuffix("_with_warmup"), run)
        if str(value).removesuffix("_with_warmup") in ("constant", "linear", "cosine")
        else Finding("not supported", "known: constant, linear, cosine", blocking=True)
    ),
    "warmup_steps": whole("train.warmup_steps"),
    "warmup_ratio": real("train.warmup_fraction"),
    "adam_beta1": _beta(0),
    "adam_beta2": _beta(1),
    "adam_epsilon": real("train.eps"),
    "seed": whole("seed"),
    "shuffle_dataset": honour("data.shuffle"),
    "save_steps": whole("checkpoint.every"),
    "save_total_limit": whole("checkpoint.keep_last"),
    "eval_steps": whole("evaluation.every"),
    "num_generations_eval": whole("evaluation.num_samples"),
    "gradient_checkpointing": honour("model.gradient_checkpointing"),
    "bf16": mapped("model.dtype", "bfloat16, on cpu float32", convert=lambda v: "auto" if v else "float32"),
    "chat_template_kwargs": honour("data.chat_template_options"),
    "use_vllm": no_effect("the native engine samples, on the training weights"),
    "report_to": no_effect("set logging.tensorboard, logging.wandb_project or logging.swanlab_project"),
    "logging_steps": no_effect("every step is logged; train.print_every thins out the console"),
    "log_completions": built_in("every response is recorded (covey show)"),
    "remove_unused_columns": no_effect("every column reaches the reward functions"),
    "use_bias_correction_kl": honour("algorithm.kl_importance_weighted"),
    "importance_sampling_level": mapped(
        "algorithm.sequence_ratio", "one ratio a response, or one a token", convert=lambda v: v == "sequence"
    ),
    "sapo_temperature_pos": real("algorithm.sapo_temperature_pos"),
    "sapo_temperature_neg": real("algorithm.sapo_temperature_neg"),
    "vespo_k_pos": _vespo("pos"),
    "vespo_lambda_pos": _vespo("pos"),
    "vespo_k_neg": _vespo("neg"),
    "vespo_lambda_neg": _vespo("neg"),
    "multi_objective_aggregation": _objectives,
    "top_entropy_quantile": mapped(
        "algorithm.top_entropy_share", "the share of tokens, counted within a micro-batch there", convert=number
    ),
    "off_policy_mask_threshold": real("algorithm.off_policy_max_kl"),
    "vllm_importance_sampling_correction": no_effect("read with vllm_importance_sampling_mode"),
    "vllm_importance_sampling_mode": _correction,
    "vllm_importance_sampling_clip_max": no_effect("read with vllm_importance_sampling_mode"),
    "vllm_importance_sampling_clip_min": no_effect("read with vllm_importance_sampling_mode"),
    "repetition_penalty": unsupported("sampling follows the policy alone", off=(1.0, None)),
    "use_adaptive_entropy": _adaptive_entropy,
    **{
        name: no_effect("read with use_adaptive_entropy")
        for name in ("entropy_target", "entropy_coef_delta", "entropy_coef_max")
    },
    "entropy_coef_min": unsupported("the smallest weight is 0", off=(0.0, None)),
    "sync_ref_model": _sync_reference,
    "ref_model_sync_steps": no_effect("read with sync_ref_model"),
    "ref_model_mixup_alpha": no_effect("read with sync_ref_model"),
    "cast_lm_head_to_fp32": built_in("logits are computed in fp32, chunk by chunk"),
    "disable_dropout": built_in("there is no dropout"),
    "vllm_mode": no_effect("settings of TRL's vLLM"),
    "vllm_gpu_memory_utilization": no_effect("the native engine's cache is limited by rollout.kv_cache_bytes"),
    "vllm_tensor_parallel_size": no_effect("rollout runs on the training weights, split as they are"),
    "vllm_max_model_length": no_effect("the native engine's cache grows with the tokens there are"),
    "vllm_enable_sleep_mode": no_effect("settings of TRL's vLLM"),
    "ds3_gather_for_generation": no_effect("weights are gathered for the rollout"),
    "num_completions_to_print": no_effect("every response is recorded (covey show)"),
    "delta": real("algorithm.dual_clip"),
    "entropy_coef": real("algorithm.entropy_coef"),
    "reward_weights": no_effect("weights stand beside the functions in reward.functions"),
    "use_liger_kernel": built_in("logits are never held whole"),
    "trust_remote_code": honour("model.trust_remote_code"),
    **lora.TRL_LORA,
}  # fmt: skip
