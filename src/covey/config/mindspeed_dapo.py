"""MindSpeed-RL's DAPO keys: clip range by side, mean of the loss, dynamic sampling, penalty near the length limit.

Upstream reads all but the penalty only under stage ray_dapo. Source: Ascend/MindSpeed-RL at 05a90d7.
"""

from __future__ import annotations

from typing import Any

from covey.config.mindspeed_rules import filters_groups, is_dapo
from covey.config.rules import Conversion, Finding, Rule, number

MAX_ROUNDS = 10  # where upstream would sample without an end


def clip_side(native_key: str) -> Rule:
    """One side of DAPO's clip range."""

    def rule(value: Any, run: Conversion) -> Finding:
        if not is_dapo(run) or not run.get("rl_config", "clip_higher_enable"):
            return Finding("no effect", "as upstream: only under ray_dapo with clip_higher_enable")
        run.set(native_key, number(value))
        return Finding("honoured", native_key)

    return rule


def token_level_loss(value: Any, run: Conversion) -> Finding:
    """Mean over tokens, or over sequences first."""
    if not is_dapo(run):
        return Finding("no effect", "as upstream: ray_grpo always takes the mean over tokens")
    run.set("algorithm.aggregation", "token_mean" if value else "sequence_mean")
    return Finding("honoured", f"algorithm.aggregation {run.native['algorithm.aggregation']}")


def filter_groups(value: Any, run: Conversion) -> Finding:
    """Dynamic sampling: groups whose rewards are all equal are replaced by further rollouts."""
    if not value:
        return Finding("honoured", "off")
    if not is_dapo(run):
        return Finding("no effect", "as upstream: only under ray_dapo; algorithm.max_rounds does it for any loss")
    given = int(number(run.get("rl_config", "filter_groups_max_batches")))
    run.set("algorithm.max_rounds", given if given > 0 else MAX_ROUNDS)
    if given > 0:
        return Finding("honoured", f"algorithm.max_rounds = {given}; then groups without spread fill the step")
    reason = f"algorithm.max_rounds = {MAX_ROUNDS}, then groups without spread fill the step; upstream samples for ever"
    return Finding("mapped", reason, differs=True)


def filter_metric(value: Any, run: Conversion) -> Finding:
    """What must have spread. Upstream: one verifier's score; here: the reward."""
    if not filters_groups(run):
        return Finding("no effect", "filter_groups_enable is off, or the stage is not ray_dapo")
    names = run.get("rl_config", "verifier_function")
    names = names if isinstance(names, list) else [names]
    if names == [value] and not run.get("rl_config", "overlong_buffer_enable"):
        return Finding("honoured", "the only reward function")
    if names == [value]:
        return Finding("honoured", "the only reward function, before the penalty for length")
    return Finding("mapped", "groups must differ in their total reward, not in this function's score", differs=True)


def filter_batch(value: Any, run: Conversion) -> Finding:
    """Groups trained on per iteration."""
    if not filters_groups(run):
        return Finding("no effect", "filter_groups_enable is off, or the stage is not ray_dapo")
    run.set("train.batch_size", int(number(value)))
    return Finding("honoured", "train.batch_size: so many groups are trained on, and sampled in every round")


def overlong_buffer(value: Any, run: Conversion) -> Finding:
    """Tokens before the limit over which the penalty grows."""
    if not run.get("rl_config", "overlong_buffer_enable"):
        return Finding("no effect", "overlong_buffer_enable is off")
    run.set("algorithm.overlong_buffer", int(number(value)))
    run.set("algorithm.overlong_penalty", number(run.get("rl_config", "overlong_buffer_penalty_factor")))
    return Finding("honoured", "algorithm.overlong_buffer and algorithm.overlong_penalty")


def overlong_switch(value: Any, run: Conversion) -> Finding:
    """Whether there is a penalty."""
    if not value:
        return Finding("honoured", "off")
    if not run.has("rl_config", "overlong_buffer"):
        return Finding("not supported", "overlong_buffer says over how many tokens: it is not given", blocking=True)
    return Finding("honoured", "algorithm.overlong_buffer; metrics grpo/score/* are before the penalty")


def overlong_limit(value: Any, run: Conversion) -> Finding:
    """The length at which the penalty is full; it has to be that of the rollout."""
    longest = run.get("sampling_config", "max_tokens")
    if not run.get("rl_config", "overlong_buffer_enable"):
        return Finding("no effect", "overlong_buffer_enable is off")
    if number(value) == number(longest):
        return Finding("honoured", "equals sampling_config.max_tokens")
    return Finding("mapped", f"the penalty is full at sampling_config.max_tokens = {longest}", differs=True)
