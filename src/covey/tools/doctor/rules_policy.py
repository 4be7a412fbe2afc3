"""Rules about the update: entropy, KL, clipping, gradients, learning rate, and rollout against training."""

from __future__ import annotations

import math

import numpy as np

from covey.tools.doctor.evidence import RunView, Seen, Series, first_step
from covey.tools.doctor.rules_reward import SCORE, constant_reward

ENTROPY = "actor/entropy"
# Under 0.03 nats a token the likeliest one has over 99.5 %: G samples are G copies. A falling entropy is how learning
# looks; it is a fault while the reward is far from its top (the quickstart ends at 0.02 nats and 88 %).
DEAD_ENTROPY, LEARNED = 0.03, 0.75
BLOWUP_RATIO, BLOWUP_NATS = 2.0, 0.5
# k3 KL to the reference of published runs stays between 0.001 and 0.1 nats a token.
KL_NATS, KL_RATIO = 0.3, 10.0
MAX_UPDATE_KL = 0.05  # nats a token in one step; PPO's usual early-stopping bound is 0.01 to 0.05
MAX_CLIPPED = 0.25  # of tokens; healthy runs clip under 5 %
USUAL_CLIP = (0.1, 0.3)  # the seed's and DAPO's range
SPIKE_RATIO, MIN_SPIKES = 10.0, 2
CLIPPED_RATIO = 20.0  # the gradient is cut to a twentieth in the median step: the norm, not lr, sets the step
DEAD_GRADIENT = 1e-8
EARLY_SHARE = 0.4  # of the run: a collapse of the learning rate's making starts there
LR_SIGNS = {"actor/grad_norm": 5.0, ENTROPY: 2.0, "actor/kl_loss": 10.0, "response_length/mean": 1.5}
DIP_ERRORS, DIP_SHARE = 4.0, 0.05
LR_REACHED = 0.5
# verl's bar for a healthy rollout is a mean difference of 0.01; a fault in weights or positions gives 0.1 and more.
MAX_GAP, FATAL_GAP = 0.01, 0.05
GAP_RATIO, GAP_FLOOR = 5.0, 1e-3
WEIGHT_RANGE = (0.8, 1.25)


def entropy_collapse(view: RunView) -> Seen | None:
    """Nothing left to explore, and the task is not solved."""
    entropy, level = view.series(ENTROPY), view.level(float(view.series(SCORE).late.mean()))
    if np.median(entropy.late) >= DEAD_ENTROPY or level >= LEARNED or constant_reward(view):
        return None
    before, late = float(np.median(entropy.early)), float(np.median(entropy.late))
    text = f"{late:.4f} nats a token (first third {before:.3f}), reward at {level:.0%} of its range"
    step = first_step(entropy, entropy.values < DEAD_ENTROPY)
    return Seen(text, "failure", step, (ENTROPY, SCORE), {"late": late, "level": level})


def entropy_blowup(view: RunView) -> Seen | None:
    """The policy becomes random."""
    entropy = view.series(ENTROPY)
    first, last = float(entropy.values[:3].mean()), float(np.median(entropy.late))
    if last < BLOWUP_RATIO * first or last < first + BLOWUP_NATS:
        return None
    step = first_step(entropy, entropy.values > max(BLOWUP_RATIO * first, first + BLOWUP_NATS))
    return Seen(
        f"{first:.2f} to {last:.2f} nats a token", "failure", step, (ENTROPY, SCORE), {"first": first, "last": last}
    )


def kl_blowup(view: RunView) -> Seen | None:
    """The policy leaves the reference."""
    kl = view.series("actor/kl_loss")
    last = float(np.median(kl.late))
    if last < KL_NATS or last < KL_RATIO * np.median(np.abs(kl.values[:3])):
        return None
    return Seen(
        f"{last:.2f} nats a token", "failure", first_step(kl, kl.values > KL_NATS), (kl.name, SCORE), {"late": last}
    )


def large_updates(view: RunView) -> Seen | None:
    """A step moves the policy too far."""
    kl, clipped = view.series("actor/ppo_kl"), view.series("actor/pg_clipfrac")
    size, share = float(np.median(np.abs(kl.late))), float(np.median(clipped.late))
    if size <= MAX_UPDATE_KL and share <= MAX_CLIPPED:
        return None
    bad = (np.abs(kl.values) > MAX_UPDATE_KL) | (clipped.values > MAX_CLIPPED)
    text = f"KL {size:.3f} nats a token, {share:.0%} of the tokens clipped in {view.updates_per_step} optimizer steps"
    return Seen(text, step=first_step(kl, bad), plots=(kl.name, clipped.name), numbers={"kl": size, "clipped": share})


def clip_range(view: RunView) -> Seen | None:
    """The clip range is unusual and it shows."""
    settings, clipped = view.config.algorithm, view.series("actor/pg_clipfrac")
    low, high = settings.clip_low, settings.clip_high
    share, size = float(np.median(clipped.late)), float(np.median(np.abs(view.series("actor/ppo_kl").late)))
    narrow = min(low, high) < USUAL_CLIP[0] and share > MAX_CLIPPED
    wide = max(low, high) > USUAL_CLIP[1] and size > MAX_UPDATE_KL
    if settings.loss != "grpo" or not (narrow or wide):  # the others' ranges are of sequences, or one-sided
        return None
    text = f"clip_low={low:g}, clip_high={high:g}: {share:.0%} of the tokens clipped, KL {size:.3f} in a step"
    return Seen(text, plots=(clipped.name,), numbers={"clipped": share, "kl": size})


def gradient_spikes(view: RunView) -> Seen | None:
    """Single steps with a gradient far over the usual."""
    norm = view.series("actor/grad_norm")
    usual = float(np.median(norm.values))
    spikes = norm.values > SPIKE_RATIO * usual
    if usual <= 0 or spikes.sum() < MIN_SPIKES or spikes.mean() > 0.3:
        return None
    text = f"{spikes.sum()} steps over {SPIKE_RATIO:g} x the median {usual:.3g}, up to {norm.values.max():.3g}"
    return Seen(
        text, step=first_step(norm, spikes), plots=(norm.name, SCORE), numbers={"max": float(norm.values.max())}
    )


def gradient_clipped(view: RunView) -> Seen | None:
    """Every gradient is cut to a small part."""
    norm, limit = view.series("actor/grad_norm"), view.config.train.max_grad_norm
    usual = float(np.median(norm.values))
    if not limit or usual < CLIPPED_RATIO * limit:
        return None
    text = f"median norm {usual:.3g}, train.max_grad_norm={limit:g}"
    return Seen(text, plots=(norm.name,), numbers={"median": usual, "limit": limit})


def gradient_vanished(view: RunView) -> Seen | None:
    """No gradient although groups have spread."""
    norm, spread = view.series("actor/grad_norm"), view.series("group/zero_variance_share")
    if np.median(norm.late) > DEAD_GRADIENT or np.median(spread.late) > 0.9:
        return None
    text = f"norm {np.median(norm.late):.1e}, with spread in {1 - np.median(spread.late):.0%} of the groups"
    return Seen(text, "failure", first_step(norm, norm.values <= DEAD_GRADIENT), (norm.name,))


def non_finite(view: RunView) -> Seen | None:
    """NaN or infinity in the update."""
    skipped, tokens = view.series("actor/skipped_steps"), view.series("actor/nonfinite_tokens")
    names = sorted({name for line in view.steps for name, value in line.items() if not math.isfinite(value)})
    total, count = float(skipped.values.sum()), float(tokens.values.sum())
    if not total and not count and not names:
        return None
    steps = [s for s in (first_step(skipped, skipped.values > 0), first_step(tokens, tokens.values > 0)) if s]
    text = f"{total:.0f} optimizer steps skipped, {count:.0f} tokens left out"
    text += f", not finite: {', '.join(names)}" if names else ""
    numbers = {"skipped": total, "tokens": count}
    return Seen(text, "failure", min(steps, default=None), ("actor/grad_norm", skipped.name), numbers)


def lr_too_high(view: RunView) -> Seen | None:
    """The reward falls early, and gradient, entropy, KL or length run away with it."""
    score = view.series(SCORE)
    early = max(2, int(EARLY_SHARE * len(score)))
    first, after = float(score.values[:2].mean()), float(score.values[early:].mean())
    fall = first - after
    if fall < max(DIP_SHARE * view.span, 3 * score.noise / math.sqrt(2)) and fall < 0.5 * (
        first - view.reward_range[0]
    ):
        return None
    signs = {name: _change(view.series(name)) for name in LR_SIGNS if view.has(name)}
    signs = {name: ratio for name, ratio in signs.items() if max(ratio, 1 / max(ratio, 1e-9)) >= LR_SIGNS[name]}
    if fall <= 0 or not signs:
        return None
    text = f"reward {first:.3f} to {after:.3f} at lr {view.config.train.lr:g}; " + ", ".join(
        f"{name} x {ratio:.3g}" for name, ratio in signs.items()
    )
    return Seen(text, "failure", int(score.steps[early]), (SCORE, *signs), {"fall": fall, **signs})


def no_warmup(view: RunView) -> Seen | None:
    """Without warm-up the first updates cost reward."""
    train, score = view.config.train, view.series(SCORE)
    if train.warmup_steps or train.warmup_fraction:
        return None
    start, dip = float(score.values[0]), float(score.values[2:8].mean())
    if start - dip < max(DIP_SHARE * view.span, DIP_ERRORS * score.noise / math.sqrt(6)):
        return None
    text = f"reward {start:.3f} at step 1, {dip:.3f} in steps 3 to 8, lr {train.lr:g} from the first update on"
    return Seen(text, step=3, plots=(SCORE, "actor/lr"), numbers={"start": start, "dip": dip})


def lr_never_arrives(view: RunView) -> Seen | None:
    """Warm-up or schedule keep the learning rate far below its peak."""
    lr, peak = view.series("actor/lr"), view.config.train.lr
    done = len(view.steps) >= view.config.train.steps  # a run under way may still be warming up
    if not done or lr.values.max() >= LR_REACHED * peak > 0:
        return None
    text = f"at most {lr.values.max():.2e} of train.lr={peak:g} in {len(lr)} steps of {view.updates_per_step} updates"
    return Seen(text, plots=(lr.name,), numbers={"max": float(lr.values.max()), "peak": peak})


def rollout_mismatch(view: RunView) -> Seen | None:
    """Rollout and training disagree about the sampled tokens."""
    gap = view.series("rollout/logprob_gap_mean")
    late = float(np.median(gap.late))
    if late <= MAX_GAP:
        return None
    severity = "failure" if late > FATAL_GAP else "warning"
    plots = (gap.name, "rollout/logprob_gap_max")
    return Seen(
        f"mean |difference| {late:.3f} nats", severity, first_step(gap, gap.values > MAX_GAP), plots, {"late": late}
    )


def mismatch_grows(view: RunView) -> Seen | None:
    """The disagreement grows over the run."""
    gap = view.series("rollout/logprob_gap_mean")
    first, last = float(np.median(gap.values[:3])), float(np.median(gap.late))
    if last < GAP_FLOOR or last < GAP_RATIO * first:
        return None
    step = first_step(gap, gap.values > max(GAP_FLOOR, GAP_RATIO * first))
    return Seen(f"{first:.1e} to {last:.1e} nats", "failure", step, (gap.name,), {"first": first, "last": last})


def stale_weights(view: RunView) -> Seen | None:
    """Rollouts of later steps come from the same weights as earlier ones."""
    versions = [
        (record.step, {response.policy_version for group in record.groups for response in group.responses})
        for record in view.records
    ]
    expected = [(step, (step - 1) * view.updates_per_step) for step, _ in versions]
    late = [
        (step, max(found), wanted)
        for (step, found), (_, wanted) in zip(versions, expected, strict=True)
        if max(found) < wanted - view.series("actor/skipped_steps").values.sum()
    ]
    if not late:
        return None
    step, found, wanted = late[-1]
    text = f"step {step} was sampled by weights of optimizer step {found}, {wanted} were done"
    plots = ("rollout/logprob_gap_mean",)
    return Seen(text, "failure", late[0][0], plots, {"found": found, "expected": wanted})


def importance_weights(view: RunView) -> Seen | None:
    """The correction for another rollout engine does too much."""
    weight = view.series("rollout/weight_mean")
    late = float(np.median(weight.late))
    if WEIGHT_RANGE[0] <= late <= WEIGHT_RANGE[1]:
        return None
    bad = (weight.values < WEIGHT_RANGE[0]) | (weight.values > WEIGHT_RANGE[1])
    return Seen(f"mean weight {late:.2f}", step=first_step(weight, bad), plots=(weight.name,), numbers={"late": late})


def _change(series: Series) -> float:
    """How many times the first two values the last third is."""
    first = float(np.abs(series.values[:2]).mean())
    return float(np.median(np.abs(series.late))) / max(first, 1e-9)
