"""Rules about rewards: the reward does not rise, falls, or rises for the wrong reason.

Thresholds were set on the quickstart and on runs with planted faults (docs/doctor.md), so that a healthy run is quiet.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import numpy as np

from covey.tools.doctor.evidence import RunView, Seen, Series, first_step

SCORE = "grpo/score/mean"
SPREAD = "group/zero_variance_share"
# Over this share of groups without spread, fewer than a third of the sampled tokens teach anything.
MAX_NO_SPREAD = 0.7
SOLVED_NO_SPREAD = 0.85  # of a solved task: having little left to learn is what success looks like
SOLVED, FAILED = 0.9, 0.1  # of the reward's range: nearly all right, nearly all wrong
# A rise under two standard errors is what chance gives one run in twenty.
RISE_ERRORS = 2.0
# A fall of 15 % of the range is three standard errors of a step of 16 x 8 responses; four rule chance out.
COLLAPSE_SHARE, COLLAPSE_ERRORS = 0.15, 4.0
NOISE_SHARE = (
    0.15  # 16 x 8 responses of a yes-no reward vary by 0.04; three times that is too few or too unlike prompts
)
MAX_FAILED_SHARE, FATAL_FAILED_SHARE = (
    0.01,
    0.1,
)  # of responses: one in a hundred is a habit, one in ten distorts groups
MAX_UNSCORED = 0.05
HACK_RISE, HACK_STANDSTILL = 0.2, 0.02  # of a component's own scale
HACK_LEVEL = 0.5  # a component that is right more often than not has been learned, not neglected
FORM = re.compile(r"format|tag|think|reason|step|length|xml|style|boxed")
GAP_RISE, GAP_SHARE = 0.1, 0.25  # training rose by a tenth of the range, held-out rows by less than a quarter of that
TASK_FALL = 0.1
TASK_RATIO = 5.0  # with a shared scale, a task of five times the spread takes 25 times the weight in the gradient
MAX_ADVANTAGE = 10.0  # normalised advantages of a group of G stay under the root of G
DUPLICATES = 0.1
MAX_PASSES = 20  # GRPO on a few hundred rows still improves for some ten passes; then it memorises
ALIKE, ALIKE_TOKENS = 0.5, 8  # half of the responses to different prompts equal, and longer than a yes or no
FILLED_STEPS, DROPPED_RATIO = 0.5, 2.0


def constant_reward(view: RunView) -> Seen | None:
    """Every response of the run has one and the same reward."""
    low, high = view.series("grpo/score/min"), view.series("grpo/score/max")
    if high.values.max() - low.values.min() > 1e-9:
        return None
    text = f"{high.values[0]:g} for every response of {len(high)} steps"
    return Seen(text, "failure", int(high.steps[0]), (SCORE, "actor/grad_norm"), {"reward": float(high.values[0])})


def groups_all_right(view: RunView) -> Seen | None:
    """Groups without spread because the task is solved."""
    return _no_spread(view, lambda level: level >= SOLVED, most=SOLVED_NO_SPREAD)


def groups_all_wrong(view: RunView) -> Seen | None:
    """Groups without spread because nothing is right."""
    return _no_spread(view, lambda level: level <= FAILED)


def samples_alike(view: RunView) -> Seen | None:
    """Groups without spread although prompts differ: sampling gives the same response G times."""
    return _no_spread(view, lambda level: FAILED < level < SOLVED)


def reward_flat(view: RunView) -> Seen | None:
    """No rise that is more than chance."""
    score = view.series(SCORE)
    level, spread = view.level(float(score.late.mean())), float(np.median(view.series(SPREAD).late))
    if (
        constant_reward(view)
        or level >= SOLVED
        or spread > MAX_NO_SPREAD
        or abs(score.rise) > RISE_ERRORS * score.rise_error
    ):
        return None
    numbers = {"rise": score.rise, "rise_error": score.rise_error}
    text = f"{score.rise:+.3f} from the first to the last third, standard error {score.rise_error:.3f}"
    return Seen(text, plots=(SCORE, "actor/grad_norm"), numbers=numbers)


def reward_collapse(view: RunView) -> Seen | None:
    """The reward was higher before."""
    score = view.series(SCORE)
    smooth = score.smooth()
    peak = int(smooth.argmax())
    drop = float(smooth[peak] - smooth[-1])
    width = len(score) - len(smooth) + 1
    if drop < max(COLLAPSE_SHARE * view.span, COLLAPSE_ERRORS * score.noise * (2 / width) ** 0.5):
        return None
    step = int(score.steps[peak + width - 1])
    return Seen(
        f"{smooth[-1]:.3f} at the end, {smooth[peak]:.3f} around step {step}",
        "failure",
        step,
        (SCORE, "actor/entropy", "response_length/mean", "actor/grad_norm"),
        {"peak": float(smooth[peak]), "end": float(smooth[-1])},
    )


def reward_noisy(view: RunView) -> Seen | None:
    """The reward moves more from step to step than it rises."""
    score = view.series(SCORE)
    if score.noise < NOISE_SHARE * view.span or score.rise > 2 * score.noise:
        return None
    text = f"varies by {score.noise:.3f} from step to step, rose by {score.rise:+.3f} in all"
    return Seen(text, plots=(SCORE,), numbers={"noise": score.noise, "rise": score.rise})


def reward_errors(view: RunView) -> Seen | None:
    """Reward functions raise."""
    return _failures(view, "errors", "raised")


def reward_timeouts(view: RunView) -> Seen | None:
    """Reward functions run out of time."""
    return _failures(view, "timeouts", "ran out of time")


def unscored(view: RunView) -> Seen | None:
    """Responses that no function scores, errors and timeouts apart."""
    none = view.series("reward/none_share")
    failed = (view.series("reward/errors").values + view.series("reward/timeouts").values) / view.num_responses
    rest = none.values - failed if len(failed) == len(none) else none.values
    if rest.mean() <= MAX_UNSCORED:
        return None
    return Seen(f"{rest.mean():.0%} of the responses", step=first_step(none, rest > MAX_UNSCORED), plots=(none.name,))


def format_hack(view: RunView) -> Seen | None:
    """The form of responses earns more and more, their content does not."""
    parts = _components(view)
    form = [s for s in parts if FORM.search(s.name) and s.rise > HACK_RISE * _scale(s)]
    content = [s for s in parts if not FORM.search(s.name)]
    stuck = [s for s in content if s.rise < HACK_STANDSTILL * _scale(s) and s.late.mean() < HACK_LEVEL * _scale(s)]
    if not form or not content or len(stuck) < len(content):
        return None
    text = "; ".join(f"{s.name} {s.early.mean():.2f} to {s.late.mean():.2f}" for s in (*form, *stuck))
    return Seen(
        text, "failure", plots=(SCORE, form[0].name, stuck[0].name), numbers={s.name: s.rise for s in (*form, *stuck)}
    )


def train_eval_gap(view: RunView) -> Seen | None:
    """Training rewards rise, held-out ones do not."""
    train, held_out = view.series(SCORE), view.series("eval/reward")
    if len(held_out) < 3 or train.rise < GAP_RISE * view.span:
        return None
    rise = float(held_out.values[-1] - held_out.values[0])
    if rise > GAP_SHARE * train.rise:
        return None
    text = f"training {train.rise:+.3f}, held-out rows {rise:+.3f}"
    return Seen(text, plots=(SCORE, held_out.name), numbers={"train": train.rise, "eval": rise})


def task_neglected(view: RunView) -> Seen | None:
    """One task gets worse while another gets better."""
    tasks = [view.series(name) for name in view.names(r"task/.+/reward")]
    fell = [s for s in tasks if s.rise < -max(TASK_FALL * view.span, RISE_ERRORS * s.rise_error)]
    rose = [s for s in tasks if s.rise > RISE_ERRORS * s.rise_error]
    if not fell or not rose:
        return None
    text = "; ".join(f"{s.name.split('/')[1]} {s.early.mean():.2f} to {s.late.mean():.2f}" for s in (*fell, *rose))
    return Seen(text, plots=(fell[0].name, rose[0].name), numbers={s.name: s.rise for s in tasks})


def task_scales(view: RunView) -> Seen | None:
    """Tasks of unlike spread share a scale that advantages keep."""
    stds = {name.split("/")[1]: float(np.median(view.series(name).values)) for name in view.names(r"task/.+/std")}
    spread = [std for std in stds.values() if std > 0]
    keeps_scale = view.config.algorithm.advantage != "group_norm" and view.config.reward.normalization == "none"
    if len(spread) < 2 or not keeps_scale or max(spread) < TASK_RATIO * min(spread):
        return None
    return Seen(", ".join(f"{task} {std:.3g}" for task, std in stds.items()), numbers=stds)


def advantage_scale(view: RunView) -> Seen | None:
    """Advantages far from 1."""
    high, low = view.series("advantage/max"), view.series("advantage/min")
    largest = np.maximum(np.abs(high.values), np.abs(low.values))
    if np.median(largest) <= MAX_ADVANTAGE:
        return None
    text = f"up to {largest.max():.3g}, {np.median(largest):.3g} in the median step"
    return Seen(
        text, step=first_step(high, largest > MAX_ADVANTAGE), plots=(high.name,), numbers={"max": float(largest.max())}
    )


def duplicate_prompts(view: RunView) -> Seen | None:
    """Equal prompts within a step."""
    texts = [[group.prompt.text for group in record.groups] for record in view.records]
    total = sum(map(len, texts))
    share = 1 - sum(len(set(step)) for step in texts) / total if total else 0.0
    if share <= DUPLICATES:
        return None
    example = Counter(text for step in texts for text in step).most_common(1)[0][0]
    return Seen(f"{share:.0%} of the prompts of a step, such as {example[:60]!r}", numbers={"share": share})


def data_exhausted(view: RunView) -> Seen | None:
    """The rows were seen many times."""
    if not view.num_prompts:
        return None
    passes = len(view.steps) * view.config.train.batch_size / view.num_prompts
    if passes <= MAX_PASSES:
        return None
    step = int(np.ceil(MAX_PASSES * view.num_prompts / view.config.train.batch_size))
    return Seen(f"{passes:.0f} passes over {view.num_prompts} prompts", step=step, numbers={"passes": passes})


def responses_alike(view: RunView) -> Seen | None:
    """One text is the answer to different prompts."""
    if not view.records:
        return None
    record = view.records[-1]
    texts = Counter(
        response.text for group in record.groups for response in {r.text: r for r in group.responses}.values()
    )
    prompts = len({group.prompt.text for group in record.groups})
    tokens = np.mean([len(response.token_ids) for group in record.groups for response in group.responses])
    text, count = texts.most_common(1)[0]
    if prompts < 4 or count / prompts <= ALIKE or tokens < ALIKE_TOKENS:
        return None
    found = f"{text[:60]!r} answers {count} of {prompts} prompts of step {record.step}"
    return Seen(found, "failure", record.step, (SCORE, "actor/entropy"), {"share": count / prompts})


def rounds_exhausted(view: RunView) -> Seen | None:
    """Dynamic sampling throws most of the rollout away, or does not find enough groups."""
    dropped, filled = view.series("rollout/dropped_groups"), view.series("rollout/filled_groups")
    ratio = float(dropped.values.mean() / view.config.train.batch_size)
    share = float((filled.values > 0).mean())
    if share <= FILLED_STEPS and ratio <= DROPPED_RATIO:
        return None
    text = f"{ratio:.1f} groups dropped for one trained on; not enough found in {share:.0%} of the steps"
    return Seen(text, plots=(dropped.name, filled.name), numbers={"dropped": ratio, "filled": share})


def _no_spread(view: RunView, at_level: Callable[[float], bool], *, most: float = MAX_NO_SPREAD) -> Seen | None:
    spread, score = view.series(SPREAD), view.series(SCORE)
    level = view.level(float(score.late.mean())) if len(score) else 0.0
    if constant_reward(view) or np.median(spread.late) <= most or not at_level(level):
        return None
    text = f"{np.median(spread.late):.0%} of the groups, at a mean reward of {score.late.mean():.3f}"
    step = first_step(spread, spread.values > most)
    return Seen(
        text, step=step, plots=(SPREAD, SCORE), numbers={"share": float(np.median(spread.late)), "level": level}
    )


def _failures(view: RunView, kind: str, verb: str) -> Seen | None:
    counts = view.series(f"reward/{kind}")
    share = float(counts.values.mean() / view.num_responses)
    if share <= MAX_FAILED_SHARE:
        return None
    blame = {n.split("_rewards/")[0]: float(view.series(n).values.sum()) for n in view.names(rf".+_rewards/{kind}")}
    worst = max(blame, key=lambda name: blame[name]) if blame else "a function"
    step = first_step(counts, counts.values > MAX_FAILED_SHARE * view.num_responses)
    severity = "failure" if share > FATAL_FAILED_SHARE else "warning"
    return Seen(
        f"`{worst}` {verb} on {share:.1%} of the responses", severity, step, (counts.name,), {"share": share, **blame}
    )


def _components(view: RunView) -> list[Series]:
    """Scores of functions and of their named parts; of a function with parts, the parts alone."""
    names = view.names(r".+_rewards/[^/]+")
    parts = [n for n in names if n.rsplit("/", 1)[1] not in ("mean", "std", "none", "errors", "timeouts")]
    owners = {n.rsplit("/", 1)[0] for n in parts}
    whole = [
        n for n in names if n.endswith("/mean") and n.rsplit("/", 1)[0] not in owners and not n.startswith("eval/")
    ]
    return [view.series(n) for n in (*parts, *whole) if not n.startswith("eval/")]


def _scale(series: Series) -> float:
    """What a component can reach at least: 1, or the largest value it had."""
    return max(1.0, float(np.abs(series.values).max()))
