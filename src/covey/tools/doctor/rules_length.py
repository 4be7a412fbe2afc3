"""Rules about the length of responses."""

from __future__ import annotations

import numpy as np

from covey.tools.doctor.evidence import RunView, Seen, first_step
from covey.tools.doctor.rules_reward import SCORE

LENGTH, TRUNCATED = "response_length/mean", "rollout/truncated_share"
# A tenth of the responses cut is a tenth without an answer, scored as wrong whatever they thought.
MAX_TRUNCATED = 0.1
NEVER = 0.95  # even a bad policy ends some responses if it can
CREEP_RATIO, CREEP_RISE = 1.5, 0.05  # half again as long for less than a twentieth of the reward's range
COLLAPSE_RATIO = 0.5


def truncated(view: RunView) -> Seen | None:
    """Responses end at the limit instead of a stop token."""
    share = view.series(TRUNCATED)
    late = float(np.median(share.late))
    if late <= MAX_TRUNCATED or never_stops(view):
        return None
    limit, mean = view.config.rollout.max_response_length, float(view.series(LENGTH).late.mean())
    text = f"{late:.0%} of the responses reach {limit} tokens; mean length {mean:.0f}"
    fix = (
        f"rollout.max_response_length: {2 * limit}; or algorithm.overlong_buffer: {max(1, limit // 5)} (a soft penalty)"
    )
    fix += ", or algorithm.mask_truncated: true (leave them out of the loss)"
    return Seen(text, step=first_step(share, share.values > MAX_TRUNCATED), plots=(TRUNCATED, LENGTH, SCORE), fix=fix)


def never_stops(view: RunView) -> Seen | None:
    """From the first step on hardly any response ends by itself."""
    share = view.series(TRUNCATED)
    if share.early.min() < NEVER or np.median(share.late) < NEVER:
        return None
    stops = view.facts.get("Model", {}).get("stop tokens", "unknown")
    return Seen(
        f"{share.values.mean():.0%} of the responses are cut; stop tokens: {stops}", "failure", plots=(TRUNCATED,)
    )


def length_creep(view: RunView) -> Seen | None:
    """Responses grow and rewards do not."""
    length, score = view.series(LENGTH), view.series(SCORE)
    ratio = float(length.late.mean() / max(length.early.mean(), 1e-9))
    if ratio < CREEP_RATIO or score.rise > CREEP_RISE * view.span:
        return None
    text = f"{length.early.mean():.0f} to {length.late.mean():.0f} tokens, reward {score.rise:+.3f}"
    step = first_step(length, length.values > CREEP_RATIO * length.early.mean())
    return Seen(text, step=step, plots=(LENGTH, SCORE), numbers={"ratio": ratio, "rise": score.rise})


def length_collapse(view: RunView) -> Seen | None:
    """Responses become short and rewards do not rise."""
    length, score = view.series(LENGTH), view.series(SCORE)
    ratio = float(length.late.mean() / max(length.early.mean(), 1e-9))
    if ratio > COLLAPSE_RATIO or score.rise > CREEP_RISE * view.span:
        return None
    text = f"{length.early.mean():.0f} to {length.late.mean():.0f} tokens, reward {score.rise:+.3f}"
    step = first_step(length, length.values < COLLAPSE_RATIO * length.early.mean())
    return Seen(text, step=step, plots=(LENGTH, SCORE), numbers={"ratio": ratio, "rise": score.rise})
