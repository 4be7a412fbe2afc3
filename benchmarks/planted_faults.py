"""The planted faults: what was done to a run, and which rules of `covey doctor RUN` must speak. Every rule has one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from benchmarks import trained_runs as trained
from benchmarks.made_runs import GIB, STEPS, Change, P, Planted, make_run


def _made(fault: str, *rules: str, change: Change | None = None, **config: Any) -> Planted:
    return Planted(fault, rules, lambda directory: make_run(directory, change, **config))


def _trained(fault: str, *rules: str, **config: Any) -> Planted:
    return Planted(fault, rules, lambda directory: trained.train_run(directory, **config), kind="trained")


def _set(**values: Any) -> Change:
    """Draw every step with these attributes; a function of how far the run is gives each step its own."""

    def change(drawn: SimpleNamespace, step: int, t: float) -> None:
        for name, value in values.items():
            setattr(drawn, name, value(t) if callable(value) else value)

    return change


def _update(values: dict[str, float | Callable[[float], float]], **attributes: Any) -> Change:
    """The same for metrics of the update."""

    def change(drawn: SimpleNamespace, step: int, t: float) -> None:
        _set(**attributes)(drawn, step, t)
        for name, value in values.items():
            drawn.update[name] = value(t) if callable(value) else value

    return change


def _timing(**seconds: float | Callable[[float], float]) -> Change:
    """The same for seconds of phases."""

    def change(drawn: SimpleNamespace, step: int, t: float) -> None:
        for name, value in seconds.items():
            drawn.timings[name] = value(t) if callable(value) else value

    return change


def _memory(**sizes: float | Callable[[float], float]) -> Change:
    """The same for GiB in use."""

    def change(drawn: SimpleNamespace, step: int, t: float) -> None:
        for name, value in sizes.items():
            drawn.memory[name] = value(t) if callable(value) else value

    return change


def _half_right(drawn: SimpleNamespace, step: int, t: float) -> None:
    drawn.right = np.arange(P) % 2 * np.ones(P)


def _all(value: float) -> Change:
    """All groups right (1) or wrong (0), but for a few."""

    def change(drawn: SimpleNamespace, step: int, t: float) -> None:
        drawn.right = np.full(P, value)
        drawn.right[: 1 + step % 2] = 1 - value  # whole groups too

    return change


def _wild(drawn: SimpleNamespace, step: int, t: float) -> None:
    drawn.level = (0.05, 0.9, 0.4, 0.75)[step % 4]


def _two_tasks(first: Callable[[float], float], second: Callable[[float], float], std: tuple[float, float]) -> Change:
    def change(drawn: SimpleNamespace, step: int, t: float) -> None:
        drawn.update |= {"task/math/reward": first(t), "task/code/reward": second(t)}
        drawn.update |= {"task/math/std": std[0], "task/code/std": std[1]}

    return change


def _spiking(drawn: SimpleNamespace, step: int, t: float) -> None:
    drawn.update["actor/grad_norm"] = 40.0 if step % 12 == 0 else 0.4


def _stale(drawn: SimpleNamespace, step: int, t: float) -> None:
    drawn.version = 0


def _runaway(drawn: SimpleNamespace, step: int, t: float) -> None:
    drawn.level = 0.5 if step <= 3 else 0.05
    drawn.update["actor/grad_norm"] = 0.4 if step <= 3 else 30.0


def _dip(drawn: SimpleNamespace, step: int, t: float) -> None:
    drawn.level = 0.5 if step == 1 else 0.2 + 0.5 * t
    drawn.update["actor/lr"] = 1e-5


def _noisy_host(drawn: SimpleNamespace, step: int, t: float) -> None:
    slow = 1.8 if step % 5 in (0, 1) else 1.0
    drawn.timings = {name: seconds * slow for name, seconds in drawn.timings.items()}


def _one_rank(drawn: SimpleNamespace, step: int, t: float) -> None:
    drawn.ranks = {"rollout_imbalance": 0.4, "rollout_slowest_rank": 5.0}


def _with_form(drawn: SimpleNamespace, step: int, t: float) -> None:
    drawn.parts = {"format": 0.2 + 0.7 * t}
    drawn.level = 0.2


_LONGER = {"kv_cache_bytes": int(30 * GIB)}

RUNS: dict[str, Planted] = {
    "healthy": _made("none"),
    "healthy_trained": _trained("none: half of the letters are right at first, GRPO teaches the rest"),
    # rewards
    "constant_trained": _trained(
        "the reward function returns 1 for everything",
        "constant_reward",
        reward={"functions": [trained.function("constant")]},
        steps=10,
    ),
    "constant": _made(
        "the function never finds the answer: 0 for everything", "constant_reward", change=_set(level=0.0)
    ),
    "solved": _made("15 of 16 problems are solved, always", "groups_all_right", change=_all(1.0)),
    "too_hard": _made("15 of 16 problems are never solved", "groups_all_wrong", change=_all(0.0)),
    "cold_trained": _trained(
        "rollout.temperature 0.01: the G samples are one", "samples_alike", rollout={"temperature": 0.01}, steps=12
    ),
    "no_spread": _made("half of the problems always right, half always wrong", "samples_alike", change=_half_right),
    "flat": _made("rewards stay at 0.4", "reward_flat", change=_set(level=0.4)),
    "collapse": _made(
        "the reward falls from 0.8 to 0.2 after two thirds",
        "reward_collapse",
        change=_set(level=lambda t: 0.4 + 0.6 * t if t < 0.66 else 0.2),
    ),
    "noisy": _made("the chance of a right answer jumps between 0.05 and 0.9", "reward_noisy", change=_wild),
    "errors_trained": _trained(
        "the reward function raises on answers with `b`",
        "reward_errors",
        reward={"functions": [trained.function("raising")]},
        steps=10,
    ),
    "timeouts_trained": _trained(
        "the reward function sleeps on answers with `b`, over its time limit",
        "reward_timeouts",
        reward={"functions": [trained.function("slow", timeout_s=0.05)]},
        steps=10,
    ),
    "errors": _made("2 % of the responses raise", "reward_errors", change=_update({"reward/errors": 3.0}, none=0.02)),
    "timeouts": _made(
        "20 % of the responses run out of time", "reward_timeouts", change=_update({"reward/timeouts": 26.0}, none=0.2)
    ),
    "unscored_trained": _trained(
        "the reward function returns None for answers with `b` or `c`",
        "unscored",
        reward={"functions": [trained.function("partial")]},
        steps=10,
    ),
    "format_hack_trained": _trained(
        "a form that contradicts the answer has ten times its weight",
        "format_hack",
        reward={
            "functions": [
                trained.function("form", label="format", weight=10.0),
                trained.function("reward", label="letters"),
            ]
        },
    ),
    "format_hack": _made("the form improves from 0.2 to 0.9, answers stay at 0.2", "format_hack", change=_with_form),
    "memorised": _made(
        "training rises by 0.5, held-out rows do not", "train_eval_gap", evaluations=lambda t: 0.3 + 0.01 * t
    ),
    "task_lost": _made(
        "one task rises from 0.2 to 0.8, another falls from 0.6 to 0.3",
        "task_neglected",
        change=_two_tasks(lambda t: 0.2 + 0.6 * t, lambda t: 0.6 - 0.3 * t, (0.4, 0.4)),
    ),
    "task_scales": _made(
        "one task's rewards spread ten times as far, advantages are only centred",
        "task_scales",
        change=_two_tasks(lambda t: 0.2 + 0.6 * t, lambda t: 2.0 + 3.0 * t, (0.4, 4.0)),
        algorithm={"advantage": "group_center"},
    ),
    "advantages": _made("advantages of 50", "advantage_scale", change=_set(advantages=25.0)),
    "duplicates_trained": _trained(
        "the training file has 4 rows, over and over", "duplicate_prompts", rows=4, steps=10
    ),
    "passes_trained": _trained("16 rows for 30 steps of 16 prompts", "data_exhausted", data={"limit": 16}, steps=30),
    "alike": _made("one text answers every prompt", "responses_alike", change=_set(text="The answer is 42.")),
    "rounds": _made(
        "4 groups are dropped for one kept, and 3 are filled",
        "rounds_exhausted",
        change=_update({"rollout/rounds": 5.0, "rollout/dropped_groups": 4.0 * P, "rollout/filled_groups": 3.0}),
        algorithm={"max_rounds": 5},
    ),
    # the update
    "lr_trained": _trained(
        "train.lr 0.1, a hundred times too much", "lr_too_high", train={"lr": 0.1, "warmup_steps": 0}, steps=20
    ),
    "entropy_dead": _made(
        "entropy falls to 0.01 while a third is right",
        "entropy_collapse",
        change=_update({"actor/entropy": lambda t: max(0.01, 0.8 - 1.6 * t)}, level=lambda t: 0.25 + 0.1 * t),
    ),
    "entropy_high": _made(
        "entropy rises from 0.8 to 4", "entropy_blowup", change=_update({"actor/entropy": lambda t: 0.8 + 3.2 * t})
    ),
    "kl": _made(
        "KL to the reference rises to 3 nats", "kl_blowup", change=_update({"actor/kl_loss": lambda t: 3 * t**3})
    ),
    "many_epochs_trained": _trained(
        "8 epochs at twice the learning rate: far off policy",
        "large_updates",
        algorithm={"epochs": 8},
        train={"lr": 4e-3},
        steps=15,
    ),
    "clip": _made(
        "clip_low and clip_high 0.01: 60 % of the tokens are clipped",
        "clip_range",
        change=_update({"actor/pg_clipfrac": 0.6}),
        algorithm={"clip_low": 0.01, "clip_high": 0.01, "epochs": 4},
    ),
    "spikes": _made("every twelfth step's gradient is a hundred times the others'", "gradient_spikes", change=_spiking),
    "gradient_cut": _made(
        "gradients of 50 under max_grad_norm 1", "gradient_clipped", change=_update({"actor/grad_norm": 50.0})
    ),
    "frozen": _made("no gradient reaches the weights", "gradient_vanished", change=_update({"actor/grad_norm": 0.0})),
    "lr_zero_trained": _trained(
        "warm-up of 1000 optimizer steps in a run of 20", "lr_never_arrives", train={"warmup_steps": 1000}, steps=10
    ),
    "nan": _made(
        "gradients become NaN in the last third",
        "non_finite",
        change=_update(
            {"actor/skipped_steps": lambda t: float(t > 0.66), "actor/nonfinite_tokens": lambda t: 9.0 * (t > 0.66)}
        ),
    ),
    "runaway": _made(
        "after three steps the gradient is 75 times as large and nothing is right", "lr_too_high", change=_runaway
    ),
    "no_warmup": _made(
        "the first update costs 0.25 of reward, no warm-up",
        "no_warmup",
        change=_dip,
        train={"warmup_fraction": 0.0, "steps": STEPS, "batch_size": P, "lr": 1e-5},
    ),
    "mismatch": _made(
        "rollout and training differ by 0.1 nats a token",
        "rollout_mismatch",
        change=_update({"rollout/logprob_gap_mean": 0.1, "rollout/logprob_gap_max": 3.0}),
    ),
    "drift": _made(
        "the difference grows from 0.001 to 0.009",
        "mismatch_grows",
        change=_update({"rollout/logprob_gap_mean": lambda t: 1e-3 + 8e-3 * t}),
    ),
    "stale": _made("the engine samples from the starting weights all along", "stale_weights", change=_stale),
    "weights": _made(
        "the rollout correction takes half of the gradient",
        "importance_weights",
        change=_update({"rollout/weight_mean": 0.5}),
        algorithm={"rollout_correction": "token_truncate"},
    ),
    # lengths
    "truncated_trained": _trained(
        "rollout.max_response_length 2: no room for the stop token",
        "truncated",
        rollout={"max_response_length": 2},
        steps=10,
    ),
    "no_stop": _made(
        "the model's end-of-text token is not among the run's stop tokens: every response is cut",
        "never_stops",
        change=_set(truncated=1.0, length=512.0, level=0.3),
    ),
    "truncated": _made("30 % of the responses are cut", "truncated", change=_set(truncated=0.3, length=450.0)),
    "creep": _made(
        "responses grow from 200 to 440 tokens, rewards stay",
        "length_creep",
        change=_set(length=lambda t: 200 + 240 * t, level=0.4),
    ),
    "shrink": _made(
        "responses shrink from 200 to 20 tokens, rewards stay",
        "length_collapse",
        change=_set(length=lambda t: 200 - 180 * t, level=0.4),
    ),
    # memory
    "update_full": _made("the update takes 76 of 80 GiB", "memory_update", change=_memory(update=76.0)),
    "scoring_full": _made(
        "the reference's log-probabilities take 75 of 80 GiB", "memory_scoring", change=_memory(scoring=75.0)
    ),
    "rollout_full": _made(
        "the rollout takes 78 of 80 GiB", "memory_rollout", change=_memory(rollout=78.0), rollout=_LONGER
    ),
    "leak": _made(
        "0.5 GiB more at the start of every step", "memory_growth", change=_memory(start=lambda t: 20 + 20 * t)
    ),
    "killed": _made(
        "the process is killed at 77 of 80 GiB, half way",
        "ended_near_limit",
        "memory_update",
        change=_memory(update=77.0),
        finished=False,
        train={"steps": 2 * STEPS, "batch_size": P, "warmup_fraction": 0.05},
    ),
    # speed
    "slow_update": _made(
        "the update takes 3 times as long from the middle on",
        "slow_phase",
        change=_timing(update=lambda t: 3 + 9 * (t > 0.5)),
    ),
    "longer": _made(
        "responses grow from 150 to 450 tokens, and rewards with them",
        "length_shift",
        change=_set(length=lambda t: 150 + 300 * t),
    ),
    "slow_reward": _made(
        "scoring takes 5 s that the rollout does not hide", "reward_bound", change=_timing(rule_reward=5.0)
    ),
    "slow_data": _made("prompts take 2 s", "data_bound", change=_timing(data=2.0)),
    "slow_sync": _made("handing weights over takes 4 s", "sync_bound", change=_timing(sync=4.0)),
    "saving": _made("every step is followed by 8 s of checkpoint", "save_bound", change=_timing(checkpoint=8.0)),
    "uneven": _made(
        "the busiest rank has half again as many tokens",
        "token_imbalance",
        change=_update({"update/token_imbalance": 0.5}),
    ),
    "slow_card": _made("rank 5 samples 40 % longer than the mean", "slow_rank", change=_one_rank),
    "tail": _made(
        "one response of 2000 tokens among 200",
        "rollout_tail",
        change=_set(longest=2000),
        rollout={"max_response_length": 2048},
    ),
    "noisy_host": _made("two of five steps take 1.8 times as long in all phases", "host_noise", change=_noisy_host),
    "debug_trained": _trained("debug: true", "debug_left_on", debug=True, steps=20),
}
