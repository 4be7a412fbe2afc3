"""MindSpeed-RL keys whose meaning depends on other keys: stage, batches, lengths, KL, clipping, rewards.

Upstream's meaning is noted where it is not what the name says. Source: Ascend/MindSpeed-RL at 05a90d7.
"""

from __future__ import annotations

from typing import Any

from covey.config.rules import Conversion, Finding, Rule, number

STAGES = {"ray_grpo": "GRPO", "ray_dapo": "DAPO", "grpo": "GRPO", "dapo": "DAPO"}
_OTHER_STAGES = {
    "ppo": "PPO trains a critic; Covey has none. GRPO needs no critic: stage ray_grpo with adv_estimator group_norm",
    "dpo": "DPO learns off-line from preference pairs; Covey trains on sampled responses (GRPO and its family)",
}
_STAGE_KEYS = (("megatron_training", "stage"), ("rl_config", "algorithm"), ("megatron_training", "algorithm"))
_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "low_var_kl": "low_var_kl"}


def is_dapo(run: Conversion) -> bool:
    """Whether the file asks for DAPO."""
    named = [run.values.get(section, {}).get(key) for section, key in _STAGE_KEYS]
    return STAGES.get(str(next((name for name in named if name), "ray_grpo")).lower()) == "DAPO"


def stage(value: Any, run: Conversion) -> Finding:
    """The algorithm."""
    name = str(value).lower()
    if name in STAGES:
        run.set("logging.names", f"mindspeed_{STAGES[name].lower()}")
        run.set("algorithm.loss", "grpo")
        run.set("algorithm.advantage", "group_norm")
        run.set("algorithm.advantage_eps", 1e-6)
        reason = (
            f"{STAGES[name]}: algorithm.loss grpo, algorithm.advantage group_norm, eps 1e-6; the loss is averaged over"
        )
        return Finding("honoured", f"{reason} all tokens of an optimizer step (upstream: within each micro-batch)")
    why = _OTHER_STAGES.get(name.removeprefix("ray_"), f"known: {', '.join(STAGES)}")
    return Finding("not supported", why, blocking=True)


def adv_estimator(value: Any, run: Conversion) -> Finding:
    """How rewards become advantages."""
    if value == "group_norm":
        return Finding("honoured", "algorithm.advantage group_norm")
    return Finding("not supported", "gae needs a critic (PPO); use group_norm", blocking=True)


def filters_groups(run: Conversion) -> bool:
    """Whether dynamic sampling is on; upstream's GRPO trainer does not read the switch."""
    return is_dapo(run) and bool(run.get("rl_config", "filter_groups_enable"))


def prompts_per_step(run: Conversion) -> int:
    """Prompts that are trained on per iteration: with dynamic sampling those that pass its filter."""
    if filters_groups(run) and run.has("rl_config", "filter_groups_train_batch_size"):
        return int(number(run.get("rl_config", "filter_groups_train_batch_size")))
    return int(number(run.get("megatron_training", "global_batch_size")))


def global_batch_size(value: Any, run: Conversion) -> Finding:
    """Prompts per iteration."""
    kept = prompts_per_step(run)
    if kept != int(number(value)):
        return Finding("mapped", f"a round samples the {kept} prompts that are trained on, not {value}")
    run.set("train.batch_size", kept)
    return Finding("honoured", "train.batch_size, in prompts")


def mini_batch_size(value: Any, run: Conversion) -> Finding:
    """Prompts per optimizer step; in files before mid 2025 responses per optimizer step."""
    size, samples = int(number(value)), int(number(run.get("rl_config", "n_samples_per_prompt")))
    why = "in prompts, as in today's schema"
    if run.old_schema:
        why = f"this file is of the schema before mid 2025, which counts responses: {size} / {samples} per prompt"
        if size % samples:
            return Finding("not supported", f"{why} is not a whole number of prompts", blocking=True)
        size //= samples
    if not run.has("megatron_training", "global_batch_size"):
        run.set("train.batch_size", size)
        return Finding("mapped", f"train.batch_size = {size}, {why}; no global_batch_size is given")
    batch = prompts_per_step(run)
    if size >= batch:
        more = "" if size == batch else f" (it cannot exceed the {batch} prompts of an iteration)"
        return Finding("mapped", f"one optimizer step per rollout{more}; {why}")
    run.set("algorithm.mini_batch_size", size)
    return Finding("honoured", f"algorithm.mini_batch_size = {size}, {why}")


def max_prompt_length(value: Any, run: Conversion) -> Finding:
    """Longest prompt; seq_length, also a limit of prompts, may be lower."""
    limits = [int(number(value))]
    if run.has("megatron_training", "seq_length"):
        limits.append(int(number(run.get("megatron_training", "seq_length"))))
    run.set("data.max_prompt_length", min(limits))
    return Finding("honoured", "data.max_prompt_length; longer prompts are dropped and counted")


def seq_length(value: Any, run: Conversion) -> Finding:
    """Despite its name the limit of the prompt alone; max_prompt_length limits it too."""
    length, other = int(number(value)), int(number(run.get("rl_config", "max_prompt_length")))
    run.set("data.max_prompt_length", min(length, other))
    if length < other:
        return Finding(
            "mapped", f"data.max_prompt_length = {length}: it limits the prompt alone; longer ones are dropped"
        )
    return Finding("no effect", f"limits the prompt alone, which max_prompt_length {other} does already")


def seq_len(value: Any, run: Conversion) -> Finding:
    """Prompt and response together; split 2 : 1 where the file does not say how."""
    total = int(number(value))
    prompt = run.values.get("rl_config", {}).get("max_prompt_length")
    response = run.values.get("sampling_config", {}).get("max_tokens")
    prompt_tokens = int(number(prompt)) if prompt is not None else None
    response_tokens = int(number(response)) if response is not None else None
    if prompt_tokens is None:
        prompt_tokens = total - response_tokens if response_tokens is not None else total * 2 // 3
        run.set("data.max_prompt_length", prompt_tokens)
    if response_tokens is None:
        run.set("rollout.max_response_length", total - prompt_tokens)
        response_tokens = total - prompt_tokens
    return Finding(
        "mapped",
        f"the sum of prompt and response: data.max_prompt_length = {prompt_tokens}, "
        f"rollout.max_response_length = {response_tokens}; set them if the split is another",
    )


def max_model_len(value: Any, run: Conversion) -> Finding:
    """Prompt and response together, a limit of the engine's cache."""
    prompt, response = run.get("rl_config", "max_prompt_length"), run.get("sampling_config", "max_tokens")
    if number(value) < number(prompt) + number(response):
        return Finding(
            "not supported",
            f"the engine would cut responses at {value} tokens in all; here {prompt} + {response} may be reached",
            differs=True,
        )
    return Finding("no effect", "the native engine's cache grows with the tokens there are (rollout.kv_cache_bytes)")


def micro_batch_size(value: Any, run: Conversion) -> Finding:
    """Responses per forward and backward; here a token budget, which does not change the gradient."""
    if run.get("rl_config", "use_dynamic_bsz"):
        return Finding("no effect", "use_dynamic_bsz: the token budget decides")
    tokens = number(run.get("rl_config", "max_prompt_length")) + number(run.get("sampling_config", "max_tokens"))
    run.set("train.max_tokens_per_micro_batch", int(number(value) * tokens))
    return Finding(
        "mapped",
        f"train.max_tokens_per_micro_batch = {int(number(value) * tokens)}: {value} x the longest prompt and response; "
        "it changes memory and speed, not the gradient",
    )


def packing_tokens(value: Any, run: Conversion) -> Finding:
    """Token budget of a micro-batch. The general key alone has no effect upstream; here it has."""
    if not run.get("rl_config", "use_dynamic_bsz"):
        return Finding("no effect", "use_dynamic_bsz is off")
    key = run.current.rpartition(".")[2]
    if key == "update_max_packing_token_size" or (
        key == "max_packing_token_size" and not run.has("rl_config", "update_max_packing_token_size")
    ):
        run.set("train.max_tokens_per_micro_batch", int(number(value)))
        ignored = key == "max_packing_token_size" and number(value) != 4096
        more = "; upstream ignores this key and packs 4096" if ignored else ""
        return Finding("honoured", f"train.max_tokens_per_micro_batch{more}", differs=bool(more))
    return Finding("no effect", "one budget, that of the update, for all passes")


def kl_coef(value: Any, run: Conversion) -> Finding:
    """Weight of the KL term in the loss."""
    if is_dapo(run):
        run.set("algorithm.kl_coef", 0.0)
        return Finding("no effect", "DAPO has no KL term")
    run.set("algorithm.kl_coef", number(value))
    return Finding("honoured", "algorithm.kl_coef" + ("" if number(value) else "; the reference is not loaded"))


def kl_penalty(value: Any, run: Conversion) -> Finding:
    """Estimator of the KL term."""
    if is_dapo(run) or not number(run.get("rl_config", "init_kl_coef")):
        return Finding("no effect", "there is no KL term")
    if value not in _ESTIMATORS:
        return Finding(
            "not supported",
            f"no such estimator in the loss; use low_var_kl (known: {', '.join(_ESTIMATORS)})",
            blocking=True,
        )
    run.set("algorithm.kl_estimator", _ESTIMATORS[value])
    if value == "kl":
        return Finding(
            "honoured",
            "algorithm.kl_estimator k1. As a loss its gradient has zero mean on policy: it does not hold the policy "
            "near the reference; low_var_kl does",
        )
    return Finding("honoured", f"algorithm.kl_estimator {_ESTIMATORS[value]}")


def kl_ctrl_type(value: Any, run: Conversion) -> Finding:
    """Upstream's adaptive controller is never updated in GRPO, so that it equals the fixed one."""
    if value == "fixed":
        return Finding("honoured", "the coefficient is fixed")
    return Finding("no effect", "upstream never updates it in GRPO; algorithm.kl_target does")


def clip_ratio(value: Any, run: Conversion) -> Finding:
    """Clip range on both sides."""
    if is_dapo(run) and run.get("rl_config", "clip_higher_enable"):
        return Finding("no effect", "clip_ratio_low and clip_ratio_high decide")
    run.set("algorithm.clip_low", number(value))
    run.set("algorithm.clip_high", number(value))
    return Finding("honoured", "algorithm.clip_low and algorithm.clip_high")


def log_max_throughput(value: Any, run: Conversion) -> Finding:
    """Longest lengths in place of means in *_tps; off when absent, though upstream's class has it on."""
    if value:
        run.set("logging.longest_in_tps", True)
    return Finding(
        "honoured", "logging.longest_in_tps" if value else "e2e_tps, update_tps, vllm_tps count mean lengths"
    )


def rule_reward(value: Any, run: Conversion) -> Finding:
    """False means a neural reward model."""
    if value:
        return Finding("honoured", "rewards are the functions of verifier_function")
    return Finding(
        "not supported",
        "false asks for a neural reward model in Megatron format; in Hugging Face format it is the reward "
        "`reward_model` with the option `path`: convert this file without the key and add it to reward.functions",
        blocking=True,
    )


def verifiers(upstream: tuple[str, ...]) -> Rule:
    """Names and weights of the reward functions; `upstream`: MindSpeed-RL's, known unless the run says otherwise."""

    def rule(value: Any, run: Conversion) -> Finding:
        known = run.reward_names or upstream
        names = value if isinstance(value, list) else [value]
        weights = run.get("rl_config", "verifier_weight")
        if not run.has("rl_config", "verifier_weight") and len(names) > 1:
            weights = [1.0] * len(names)
        if not isinstance(weights, list) or len(weights) != len(names):
            return Finding("not supported", f"{len(names)} functions but verifier_weight {weights}", blocking=True)
        unknown = [name for name in names if name not in known and ":" not in str(name)]
        if unknown:
            reason = f"no reward function {', '.join(unknown)} (known: {', '.join(known)}, or module:function)"
            return Finding("not supported", f"{reason}; upstream would score 0 for ever", blocking=True)
        run.set(
            "reward.functions",
            [{"name": name, "weight": number(weight)} for name, weight in zip(names, weights, strict=True)],
        )
        return Finding("honoured", "reward.functions")

    return rule


def sampling(native_key: str, upstream_default: float, *, off: Any = None) -> Rule:
    """A sampling parameter; upstream's default sharpens the distribution that is trained."""

    def rule(value: Any, run: Conversion) -> Finding:
        if off is not None and value == off:
            return Finding("honoured", f"{native_key}: off")
        run.set(native_key, type(upstream_default)(number(value)))
        narrows = native_key != "rollout.temperature" and value not in (0, 1)
        more = (
            "; the policy that samples is then not the one that is trained (algorithm.sampling_consistent)"
            if narrows
            else ""
        )
        return Finding("honoured", f"{native_key}{more}")

    return rule
