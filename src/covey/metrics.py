"""Every number that a run reports: one table, and the summary of a training step.

Names are MindSpeed-RL's where the meaning is the same, so that dashboards keep working; where the meaning differs, the
definition says so. `python -m covey.metrics` prints the table; docs/metrics.md is that print. A name that is not in the
table is an error, so that no metric goes undocumented. Evaluation and SFT declare their names here and compute
their values themselves. Not here: how values are written (loggers.py).
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from covey.types import Group

# How the values of several devices become one: `global` is computed once from sums over all of them.
Reduction = Literal["global", "max", "mean", "same"]


@dataclass(frozen=True)
class Metric:
    """What a reported number means. A name's `{word}` stands for any text, `{k}` for a number."""

    unit: str
    definition: str
    reduction: Reduction = "global"


METRICS: dict[str, Metric] = {
    "timing/all": Metric("s", "Wall time of the step, evaluation and checkpoint left out.", "max"),
    "timing/cpu": Metric(
        "s", "Processor time of the trainer's process in the step, its threads together; reward workers apart.", "max"
    ),
    "timing/data": Metric("s", "Getting the prompts.", "max"),
    "timing/rollout_imbalance": Metric(
        "share", "How much longer the slowest rank sampled than the mean, waiting left out; 0: perfect balance."
    ),
    "timing/rollout_slowest_rank": Metric("rank", "Which rank that was."),
    "timing/rollout": Metric("s", "Sampling the responses.", "max"),
    "timing/rule_reward": Metric(
        "s", "From the first finished group until all are scored; runs beside the rollout.", "max"
    ),
    "timing/non_overlap_rule_reward": Metric("s", "Scoring after the rollout's end, which did not hide it.", "max"),
    "timing/adv": Metric("s", "Advantages from rewards.", "max"),
    "timing/old_log_p": Metric(
        "s", "Log-probabilities of the policy that starts the update; 0 when not needed.", "max"
    ),
    "timing/reference_model": Metric(
        "s", "Log-probabilities of the reference, and its moves; 0 without a KL term.", "max"
    ),
    "timing/teacher_model": Metric("s", "Log-probabilities of the teacher; 0 without distillation.", "max"),
    "timing/update": Metric("s", "Forward, backward and optimizer steps.", "max"),
    "timing/sync": Metric("s", "Handing the new weights to the rollout engine.", "max"),
    "timing/eval": Metric("s", "Held-out evaluation, on steps that have one; not part of timing/all.", "max"),
    "timing/checkpoint": Metric("s", "Writing a checkpoint, on steps that have one; not part of timing/all.", "max"),
    "prompt_length/mean": Metric("tokens", "Mean prompt length."),
    "prompt_length/max": Metric("tokens", "Longest prompt."),
    "prompt_length/min": Metric("tokens", "Shortest prompt."),
    "response_length/mean": Metric("tokens", "Mean response length, the stop token included."),
    "response_length/max": Metric("tokens", "Longest response."),
    "response_length/min": Metric("tokens", "Shortest response."),
    "grpo/score/mean": Metric(
        "reward", "Mean total reward over the responses that were scored, before any normalisation."
    ),
    "grpo/score/max": Metric("reward", "Highest total reward."),
    "grpo/score/min": Metric("reward", "Lowest total reward."),
    "{reward}_rewards/mean": Metric("score", "Mean score of one reward function, before its weight, where it scored."),
    "{reward}_rewards/std": Metric("score", "Standard deviation of one reward function's scores over the responses."),
    "{reward}_rewards/none": Metric("count", "Responses to which one reward function does not apply."),
    "{reward}_rewards/errors": Metric("count", "Responses on which one reward function raised."),
    "{reward}_rewards/timeouts": Metric("count", "Responses on which one reward function ran out of time."),
    "{reward}_rewards/{part}": Metric("score", "Mean of a named part of one reward function's score."),
    "task/{task}/reward": Metric("reward", "Mean total reward over the scored responses of one task."),
    "task/{task}/std": Metric("reward", "Standard deviation of the total reward over the responses of one task."),
    "task/{task}/unscored_share": Metric("share", "Responses of one task without a reward."),
    "reward/none_share": Metric("share", "Responses that no reward function scored; their advantage is 0."),
    "reward/errors": Metric("count", "Responses that a reward function left unscored because it raised."),
    "reward/timeouts": Metric("count", "Responses that a reward function left unscored because its time ran out."),
    "group/zero_variance_share": Metric(
        "share", "Groups whose scored responses all have one reward: nothing to learn."
    ),
    "advantage/mean": Metric("1", "Mean advantage over all responses."),
    "advantage/max": Metric("1", "Largest advantage."),
    "advantage/min": Metric("1", "Smallest advantage."),
    "rollout/truncated_share": Metric("share", "Responses that ended at max_response_length without a stop token."),
    "rollout/logprob_gap_mean": Metric("nats", "Mean |training - rollout log-probability| of the sampled tokens."),
    "rollout/logprob_gap_max": Metric("nats", "Largest |training - rollout log-probability|."),
    "rollout/logprob_gap_share": Metric("share", "Tokens whose |training - rollout log-probability| is over 0.1."),
    "rollout/mismatch_k3": Metric(
        "nats", "KL(rollout || training) by the k3 estimator: mean of exp(d) - 1 - d, d = training - rollout log-prob."
    ),
    "rollout/rounds": Metric("count", "Rollouts of this step; reported when algorithm.max_rounds is over 1."),
    "rollout/dropped_groups": Metric("count", "Groups sampled and not trained on: without spread, or surplus."),
    "rollout/filled_groups": Metric("count", "Groups without spread that are trained on because rounds ran out."),
    "rollout/weight_mean": Metric(
        "1", "Mean importance weight of algorithm.rollout_correction over the update's tokens; absent without it."
    ),
    "actor/loss": Metric("1", "What is minimised: pg_loss + kl_coef kl_loss - entropy_coef entropy; signed."),
    "actor/pg_loss": Metric(
        "1", "The surrogate alone, signed, mean over optimizer steps. MindSpeed-RL: absolute value of the whole loss."
    ),
    "actor/kl_loss": Metric("nats", "Estimated KL to the reference per token, before its coefficient."),
    "actor/kl_coef": Metric("1", "Coefficient of the KL term in this step; changes with algorithm.kl_target.", "same"),
    "actor/entropy_coef": Metric(
        "1", "Weight of the entropy bonus in this step; reported when algorithm.entropy_target steers it.", "same"
    ),
    "distill/kl": Metric(
        "nats",
        "Mean old log-probability - teacher's: estimates the KL(policy || teacher) per token; k1, may be negative.",
    ),
    "actor/entropy": Metric(
        "nats", "Mean entropy per token of the policy at the training temperature; always computed."
    ),
    "actor/pg_clipfrac": Metric("share", "Tokens whose gradient the clip removed."),
    "actor/ppo_kl": Metric("nats", "Mean old - current log-probability (k1), over the update."),
    "actor/grad_norm": Metric("1", "Norm of the gradient before clipping, mean over optimizer steps.", "same"),
    "actor/lr": Metric("1", "Learning rate of the step's last optimizer step.", "same"),
    "actor/skipped_steps": Metric("count", "Optimizer steps left out because their gradient was not finite.", "same"),
    "actor/nonfinite_tokens": Metric("count", "Response tokens left out of the loss: their ratio was not finite."),
    "update/token_imbalance": Metric(
        "share", "How many more packed tokens the busiest data-parallel rank ran than the mean; 0: perfect balance."
    ),
    "e2e_tps": Metric(
        "tokens/s", "Tokens per device and second of timing/all; a prompt counts once per response, as in MindSpeed-RL."
    ),
    "update_tps": Metric("tokens/s", "The same tokens per device and second of timing/update."),
    "vllm_tps": Metric("tokens/s", "The same tokens per device and second of timing/rollout, whatever the engine is."),
    "rollout/generated_tps": Metric("tokens/s", "Response tokens alone per device and second of timing/rollout."),
    "memory/peak_bytes": Metric(
        "bytes", "Most memory in use in the step: the device's, or the process's on cpu.", "max"
    ),
    "memory/start_bytes": Metric("bytes", "Memory in use when the step starts.", "max"),
    "memory/rollout_bytes": Metric("bytes", "Most memory in use while sampling.", "max"),
    "memory/scoring_bytes": Metric(
        "bytes", "Most memory in use while log-probabilities of old policy, reference, teacher are computed.", "max"
    ),
    "memory/update_bytes": Metric("bytes", "Most memory in use in the update.", "max"),
    "memory/limit_bytes": Metric(
        "bytes", "Memory that the device has, or on cpu the host or its control group.", "max"
    ),
    "eval/reward": Metric("reward", "Mean total reward on held-out rows."),
    "eval/pass@{k}": Metric("share", "Unbiased estimate that one of k responses reaches evaluation.pass_threshold."),
    "eval/{reward}_rewards/mean": Metric("score", "Mean score of one reward function on held-out rows."),
    "eval/task/{task}/reward": Metric("reward", "Mean total reward on held-out rows of one task."),
    "eval/task/{task}/pass@1": Metric("share", "pass@1 on held-out rows of one task."),
    "eval/response_length/mean": Metric("tokens", "Mean response length on held-out rows."),
    "eval/truncated_share": Metric("share", "Held-out responses that ended at the length limit."),
    "sft/loss": Metric("nats", "Cross-entropy per response token of the demonstrations."),
    "sft/tps": Metric("tokens/s", "Prompt and response tokens of the demonstrations per device and second."),
}


def summarize(
    groups: Sequence[Group],
    rewards: np.ndarray,  # (P, G) total reward; NaN: not scored, or no such response
    *,
    parts: Mapping[str, np.ndarray],  # (P, G) per reward function, before its weight; NaN: not scored
    advantages: np.ndarray,  # (P, G)
    timings: Mapping[str, float],  # seconds under the names after `timing/`; `all` is needed
    update: Mapping[str, float],  # metrics that others measured, under their names
    world_size: int,  # devices that share the step
) -> dict[str, float]:
    """The metrics of a training step over the groups of all devices. A mean over nothing is left out.

    Raises ValueError for a name in `timings` or `update` that METRICS does not declare.
    """
    responses = [response for group in groups for response in group.responses]
    response_lengths = np.array([len(response.token_ids) for response in responses])
    prompt_lengths = np.array([len(group.prompt.input_ids) for group in groups])
    repeats = np.array([len(group.responses) for group in groups])
    num_tokens = float(response_lengths.sum() + (prompt_lengths * repeats).sum())

    values = {f"timing/{name}": float(seconds) for name, seconds in timings.items()}
    exists = np.arange(rewards.shape[1]) < repeats[:, None]  # False in the tail of a group smaller than the largest
    values |= _spread("prompt_length", prompt_lengths) | _spread("response_length", response_lengths)
    values |= _spread("grpo/score", rewards)
    for name, scores in parts.items():
        values |= {k: v for k, v in _spread(f"{name}_rewards", scores).items() if k.endswith("/mean")}
    values["reward/none_share"] = float(np.isnan(rewards[exists]).mean())
    values["group/zero_variance_share"] = float(np.mean([_all_equal(row) for row in rewards]))
    values |= _spread("advantage", advantages[exists])
    values["rollout/truncated_share"] = float(np.mean([response.finish_reason == "length" for response in responses]))
    for name, seconds in (("e2e_tps", "all"), ("update_tps", "update"), ("vllm_tps", "rollout")):
        values |= _rate(name, num_tokens / world_size, timings.get(seconds, 0.0))
    generated = float(response_lengths.sum()) / world_size
    values |= _rate("rollout/generated_tps", generated, timings.get("rollout", 0.0))
    values |= {name: float(value) for name, value in update.items()}
    check_names(values)
    return values


def mindspeed_metrics(values: Mapping[str, float], *, stage: str, longest: bool) -> dict[str, float]:
    """A step's values as MindSpeed-RL reports them, so that its dashboards go on; what it does not know stays as it is.

    stage: `grpo` or `dapo`, the prefix of the scores. longest: `*_tps` count the longest prompt and response for each
    one (log_max_throughput). Differences that stay: `actor/pg_loss` is the absolute value of the step's mean loss
    (upstream: the mean of absolute micro-batch losses); entropy is always the true one (upstream 0 without a bonus).
    """
    renamed = {name.replace("grpo/score", f"{stage}/score"): value for name, value in values.items()}
    if "actor/loss" in values:
        renamed["actor/pg_loss"] = abs(values["actor/loss"])
    for ours, theirs in _MINDSPEED_TIMINGS.items():
        if ours in values:
            renamed[theirs] = values[ours]
    mean, most = (
        sum(values.get(f"{part}_length/{kind}", 0.0) for part in ("prompt", "response")) for kind in ("mean", "max")
    )
    if longest and mean:
        renamed |= {name: values[name] * most / mean for name in _RATES if name in values}
    return renamed


_RATES = ("e2e_tps", "update_tps", "vllm_tps")
# Seconds that the rollout did not hide: the only ones measured here. Upstream reports them beside the whole.
_MINDSPEED_TIMINGS = {
    "timing/reference_model": "timing/non_overlap_reference_model",
    "timing/adv": "timing/non_overlap_adv",
    "timing/sync": "timing/resharding_to_infer",
}


def check_names(names: Iterable[str]) -> None:
    """Raise ValueError for the first name that METRICS does not declare."""
    for name in names:
        find(name)


def find(name: str) -> Metric:
    """The entry of METRICS that declares `name`; ValueError with the nearest names if none does."""
    if name in METRICS:
        return METRICS[name]
    for pattern, metric in _PATTERNS:
        if pattern.fullmatch(name):
            return metric
    near = difflib.get_close_matches(name, METRICS, n=3)
    hint = f"nearest: {', '.join(near)}" if near else "nothing near it"
    raise ValueError(f"metric {name!r} is not declared in METRICS of covey/metrics.py ({hint}); add it there")


def reference() -> str:
    """The table as Markdown."""
    lines = [
        "# Metrics",
        "",
        "Printed by `python -m covey.metrics`. `metrics.jsonl` has one line a step with these names and `step`.",
        "Devices: how the values of several devices become one (`global`: from sums over all of them).",
        "",
        "| name | unit | devices | definition |",
        "|---|---|---|---|",
    ]
    rows = (
        f"| `{name}` | {metric.unit} | {metric.reduction} | {metric.definition.replace('|', chr(92) + '|')} |"
        for name, metric in METRICS.items()
    )
    return "\n".join([*lines, *rows]) + "\n"


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    """Mean, max and min of the values that are not NaN; nothing if there are none."""
    known = values[~np.isnan(values)]
    if known.size == 0:
        return {}
    return {f"{name}/mean": float(known.mean()), f"{name}/max": float(known.max()), f"{name}/min": float(known.min())}


def _all_equal(rewards: np.ndarray) -> bool:
    known = rewards[~np.isnan(rewards)]
    return bool(np.all(known == known[:1]))


def _rate(name: str, amount: float, seconds: float) -> dict[str, float]:
    return {name: amount / seconds} if seconds > 0 else {}


_PLACEHOLDERS = {"{k}": r"\d+", "{reward}": ".+", "{part}": ".+", "{task}": ".+"}


def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"(\{\w+\})", name)
    return re.compile("".join(_PLACEHOLDERS.get(part, re.escape(part)) for part in parts))


_PATTERNS = [(_pattern(name), metric) for name, metric in METRICS.items() if "{" in name]

if __name__ == "__main__":
    sys.stdout.write(reference())
