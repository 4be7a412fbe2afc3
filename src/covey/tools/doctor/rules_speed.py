"""Rules about speed: where the time of a step goes, and what made it grow.

A step is slow because there is more to do (lengths), one part got slower, ranks wait for one, or the host gives less.
Seconds per token tell the first from the rest, processor time the last.
"""

from __future__ import annotations

import numpy as np

from covey.tools.doctor.evidence import RunView, Seen, Series, first_step

PHASES = ("rollout", "rule_reward", "adv", "old_log_p", "reference_model", "teacher_model", "update", "sync", "data")
STEP = "timing/all"
SLOWDOWN = 1.4  # seconds a token; less is within what neighbours on a shared host do
LONGER = 1.4
REWARD_SHARE, DATA_SHARE, SYNC_SHARE, SAVE_SHARE = 0.25, 0.1, 0.2, 0.3  # of the step; they should hide or be short
IMBALANCE = 0.2
SLOW_RANK, SAME_RANK = 0.2, 0.8  # behind the mean; share of steps in which it is the same rank
SLOW_STEPS, ALIKE = 0.15, 1.25  # share of slow steps; how much slower every large phase is in them
LARGE_PHASE = 0.1  # of the step's seconds
TAIL_RATIO, TAIL_SHARE = 6.0, 0.6  # longest over mean response; share of the step that sampling takes
DEBUG_STEPS = 20


def slow_phase(view: RunView) -> Seen | None:
    """The same tokens take longer than before: the phase that grew most."""
    if host_noise(view):
        return None
    whole = _per_token(view, STEP)
    if len(whole) < 6 or _ratio(whole) < SLOWDOWN:
        return None
    phases = [_per_token(view, f"timing/{name}") for name in PHASES if view.has(f"timing/{name}")]
    grown = {p.name: float(np.median(p.late) - np.median(p.early)) for p in phases if len(p)}
    worst = max(grown, key=lambda name: grown[name])
    share = grown[worst] / (float(np.median(whole.late)) - float(np.median(whole.early)))
    text = f"{_ratio(whole):.1f} x the seconds a token; {worst} has {share:.0%} of the growth"
    step = first_step(whole, whole.values > SLOWDOWN * np.median(whole.early))
    fix = _PHASE_FIX.get(worst.removeprefix("timing/"), "")
    return Seen(text, step=step, plots=(STEP, worst, "e2e_tps"), numbers={"ratio": _ratio(whole), **grown}, fix=fix)


def length_shift(view: RunView) -> Seen | None:
    """Steps take longer because responses are longer."""
    seconds, length, whole = view.series(STEP), view.series("response_length/mean"), _per_token(view, STEP)
    longer = float(np.median(length.late) / np.median(length.early))
    if _ratio(seconds) < SLOWDOWN or longer < LONGER or _ratio(whole) >= SLOWDOWN:
        return None
    text = f"step {_ratio(seconds):.1f} x, responses {longer:.1f} x as long, seconds a token {_ratio(whole):.1f} x"
    return Seen(text, plots=(STEP, length.name), numbers={"seconds": _ratio(seconds), "length": longer})


def reward_bound(view: RunView) -> Seen | None:
    """The step waits for reward functions."""
    share = _share(view, "rule_reward")
    if share <= REWARD_SHARE:
        return None
    workers = view.config.reward.num_workers
    fix = f"reward.num_workers: {max(2, 2 * workers)} (now {workers}); `batch: true` where the function vectorises; "
    fix += "a shorter timeout_s; `covey reward try` times a function"
    return Seen(f"{share:.0%} of the step", plots=("timing/rule_reward", STEP), numbers={"share": share}, fix=fix)


def data_bound(view: RunView) -> Seen | None:
    """The step waits for prompts."""
    share = _share(view, "data")
    if share <= DATA_SHARE:
        return None
    return Seen(f"{share:.0%} of the step", plots=("timing/data", STEP), numbers={"share": share})


def sync_bound(view: RunView) -> Seen | None:
    """Handing weights to the rollout engine takes long."""
    share = _share(view, "sync")
    if share <= SYNC_SHARE:
        return None
    return Seen(f"{share:.0%} of the step", plots=("timing/sync", STEP), numbers={"share": share})


def save_bound(view: RunView) -> Seen | None:
    """Evaluations and checkpoints take a large part of the run."""
    names = [name for name in ("timing/eval", "timing/checkpoint") if view.has(name)]
    beside = {name: float(view.series(name).values.sum()) for name in names}
    total = sum(beside.values()) + float(view.series(STEP).values.sum())
    share = sum(beside.values()) / total
    if share <= SAVE_SHARE:
        return None
    text = f"{share:.0%} of the run: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in beside.items())
    return Seen(text, plots=tuple(names), numbers={"share": share, **beside})


def token_imbalance(view: RunView) -> Seen | None:
    """Ranks run unequal numbers of tokens."""
    uneven = view.series("update/token_imbalance")
    late = float(np.median(uneven.values))
    if late <= IMBALANCE:
        return None
    text = f"the busiest rank runs {late:.0%} more tokens than the mean"
    return Seen(
        text, step=first_step(uneven, uneven.values > IMBALANCE), plots=(uneven.name,), numbers={"median": late}
    )


def slow_rank(view: RunView) -> Seen | None:
    """One rank is slower than the others, always the same."""
    behind, which = view.series("timing/rollout_imbalance"), view.series("timing/rollout_slowest_rank")
    late = float(np.median(behind.values))
    ranks, counts = np.unique(which.values, return_counts=True)
    rank, same = int(ranks[counts.argmax()]), float(counts.max() / len(which))
    if late <= SLOW_RANK or same < SAME_RANK:
        return None
    text = f"rank {rank} samples {late:.0%} longer than the mean and is the slowest in {same:.0%} of the steps"
    step = first_step(behind, behind.values > SLOW_RANK)
    return Seen(
        text, step=step, plots=(behind.name, "timing/rollout"), numbers={"rank": rank, "behind": late, "same": same}
    )


def rollout_tail(view: RunView) -> Seen | None:
    """A few long responses hold the rollout up."""
    longest, mean = view.series("response_length/max"), view.series("response_length/mean")
    ratio, share = float(np.median(longest.values / mean.values)), _share(view, "rollout")
    if ratio <= TAIL_RATIO or share <= TAIL_SHARE:
        return None
    text = f"the longest response has {ratio:.1f} x the mean's tokens, sampling takes {share:.0%} of the step"
    return Seen(text, plots=(longest.name, "timing/rollout"), numbers={"ratio": ratio, "share": share})


def host_noise(view: RunView) -> Seen | None:
    """Some steps are slow in all their phases: the host or the device gives less, the program is the same."""
    whole = _per_token(view, STEP)
    if len(whole) < 8:
        return None
    fast = whole.values <= np.quantile(whole.values, 0.25)
    slow = whole.values > SLOWDOWN * np.median(whole.values[fast])
    ratios = {name: _slower(_per_token(view, name), fast, slow) for name in _large_phases(view)} if slow.any() else {}
    if slow.mean() < SLOW_STEPS or len(ratios) < 2 or min(ratios.values()) < ALIKE:
        return None
    cpu = _slower(_per_token(view, "timing/cpu"), fast, slow)
    text = f"{slow.mean():.0%} of the steps take over {SLOWDOWN:g} x the fast ones' seconds a token in all phases: "
    text += ", ".join(f"{name} {ratio:.1f} x" for name, ratio in ratios.items()) + f", processor time {cpu:.1f} x"
    numbers = {"share": float(slow.mean()), "timing/cpu": cpu, **ratios}
    return Seen(text, step=first_step(whole, slow), plots=(STEP, "timing/cpu"), numbers=numbers)


def debug_left_on(view: RunView) -> Seen | None:
    """The debug mode is on in a long run."""
    if not view.config.debug or len(view.steps) < DEBUG_STEPS:
        return None
    return Seen(f"debug: true for {len(view.steps)} steps", plots=("e2e_tps",))


def _per_token(view: RunView, name: str) -> Series:
    """Seconds of a phase over the tokens of the step, prompts once a response."""
    seconds = view.series(name)
    lines = {line["step"]: line for line in view.steps}
    tokens = [lines[s]["response_length/mean"] + lines[s]["prompt_length/mean"] for s in seconds.steps]
    values = seconds.values / (np.array(tokens) * view.num_responses) if len(seconds) else seconds.values
    return Series(name, seconds.steps[1:], values[1:])  # the first step compiles, allocates, fills caches


def _ratio(series: Series) -> float:
    return float(np.median(series.late) / max(float(np.median(series.early)), 1e-12))


def _large_phases(view: RunView) -> list[str]:
    """The phases that take over a tenth of the run each."""
    names = [f"timing/{name}" for name in PHASES if view.has(f"timing/{name}")]
    return [name for name in names if _share(view, name.removeprefix("timing/")) > LARGE_PHASE]


def _slower(series: Series, fast: np.ndarray, slow: np.ndarray) -> float:
    """How many times the fast steps' median the slow steps' is."""
    return float(np.median(series.values[slow]) / max(float(np.median(series.values[fast])), 1e-12))


def _share(view: RunView, phase: str) -> float:
    part, whole = view.series(f"timing/{phase}").values[1:], view.series(STEP).values[1:]
    return float(part.sum() / whole.sum()) if len(part) and whole.sum() > 0 else 0.0


_PHASE_FIX = {
    "rollout": "look at lengths and `slow_rank`; rollout.max_num_seqs and kv_cache_bytes bound what is sampled at once",
    "rule_reward": "reward.num_workers up; find the function by NAME_rewards/timeouts and `covey reward try`",
    "update": "a card that throttles or shares its bus: `covey doctor` on every host",
    "sync": "the way between cards: `covey doctor` for topology and variables of the communication library",
    "data": "data on a local disk, prepared by `covey preprocess`",
}
