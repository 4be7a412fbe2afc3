"""The rules about speed: what each needs, what is expected, why it matters, the remedy."""

from __future__ import annotations

from covey.tools.doctor import rules_speed as speed
from covey.tools.doctor.evidence import Rule
from covey.tools.doctor.rules_length import LENGTH
from covey.tools.doctor.rules_speed import STEP

_TOKENS = (STEP, LENGTH, "prompt_length/mean")

SPEED = (
    Rule(
        "slow_phase",
        "speed",
        _TOKENS,
        10,
        f"under {speed.SLOWDOWN:g} x the first third's seconds a token",
        "the same work takes longer: a card, a link, a disk or a service has become slow",
        "`covey doctor` on every host; compare with the phase before the step that is named",
        speed.slow_phase,
    ),
    Rule(
        "length_shift",
        "speed",
        _TOKENS,
        10,
        f"steps under {speed.SLOWDOWN:g} x, or as much longer as their responses",
        "nothing is broken: there is more to compute",
        "algorithm.overlong_buffer and max_response_length bound it; length_creep says whether it pays",
        speed.length_shift,
    ),
    Rule(
        "reward_bound",
        "speed",
        ("timing/rule_reward", STEP),
        3,
        f"at most {speed.REWARD_SHARE:.0%} of the step",
        "scoring runs beside sampling; what is left over, all devices wait for",
        "reward.num_workers up",
        speed.reward_bound,
    ),
    Rule(
        "data_bound",
        "speed",
        ("timing/data", STEP),
        3,
        f"at most {speed.DATA_SHARE:.0%} of the step",
        "all devices wait for prompts",
        "data on a local disk, prepared by `covey preprocess`",
        speed.data_bound,
    ),
    Rule(
        "sync_bound",
        "speed",
        ("timing/sync", STEP),
        3,
        f"at most {speed.SYNC_SHARE:.0%} of the step",
        "weights travel to the rollout engine in every step",
        "engine and trainer on the same cards; links between cards (`covey doctor`); more samples a step",
        speed.sync_bound,
    ),
    Rule(
        "save_bound",
        "speed",
        (STEP,),
        3,
        f"evaluations and checkpoints at most {speed.SAVE_SHARE:.0%} of the run",
        "they stand between steps",
        "evaluation.every and checkpoint.every up, fewer held-out rows or samples, checkpoint.background: true",
        speed.save_bound,
    ),
    Rule(
        "token_imbalance",
        "speed",
        ("update/token_imbalance",),
        1,
        f"at most {speed.IMBALANCE:.0%} more tokens on the busiest rank",
        "the others wait for it at every optimizer step",
        "train.max_tokens_per_micro_batch / 2 (finer pieces to share out), more prompts a mini-batch",
        speed.token_imbalance,
    ),
    Rule(
        "slow_rank",
        "speed",
        ("timing/rollout_imbalance", "timing/rollout_slowest_rank"),
        5,
        f"no rank that is always the slowest by over {speed.SLOW_RANK:.0%}",
        "all ranks run at the speed of the slowest",
        "`covey doctor` on that rank's host: throttling, memory in use, processor cores; take the card out",
        speed.slow_rank,
    ),
    Rule(
        "rollout_tail",
        "speed",
        ("response_length/max", LENGTH, "timing/rollout", STEP),
        3,
        f"a longest response under {speed.TAIL_RATIO:g} x the mean, or sampling a small part of the step",
        "the device decodes a handful of responses for most of the rollout",
        "rollout.max_response_length down, algorithm.overlong_buffer, more prompts a step to fill the device",
        speed.rollout_tail,
    ),
    Rule(
        "host_noise",
        "speed",
        ("timing/cpu", *_TOKENS),
        10,
        "no slow steps, or slow in one phase only",
        "the process waits: other processes took its cores, or the device runs slower (heat, power)",
        "`top` and `covey doctor` while it is slow; bind cores (taskset, CPU_AFFINITY_CONF); clocks and "
        "temperature of the device",
        speed.host_noise,
    ),
    Rule(
        "debug_left_on",
        "speed",
        (STEP,),
        1,
        f"debug: false in runs over {speed.DEBUG_STEPS} steps",
        "every launch waits, every exchange is compared, every output is tested",
        "debug: false",
        speed.debug_left_on,
    ),
)
