"""What a replayed step is compared with, and how close it has to be. `covey replay` prints the checks of this file.

Rungs in the order in which a step computes them; the first that differs is where to look. On the device, versions and
number of threads that made the record, every number must have equal bits; elsewhere a profile says what is allowed:
kernels of another device, or sums over another number of ranks, round differently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from covey.rewards.scores import Scores
from covey.rollout.records import Records
from covey.types import Group

RUNGS = ("responses", "rewards", "logprobs", "advantages", "learning rate", "loss", "gradient", "weights")


@dataclass(frozen=True)
class Profile:
    """Largest differences allowed. All are 0 where bits must be equal."""

    name: str
    responses: float = 0.0  # share of the step's responses that may differ: a draw at a boundary falls either way
    rewards: float = 0.0  # absolute
    logprobs: float = 0.0  # nats, mean over tokens, and for single numbers made of them
    logprobs_max: float = 0.0  # nats, any token
    advantages: float = 0.0  # absolute
    loss: float = 0.0  # absolute; losses are of the size of the advantages, about 1
    gradient: float = 0.0  # relative
    weights: float = 0.0  # norm of the difference, relative to the norm of the weights

    @property
    def exact(self) -> bool:
        """Whether bits must be equal."""
        return self.name == EXACT.name

    def after(self, num_steps: int) -> Profile:
        """For a state that was itself recomputed by `num_steps` steps, whose differences add up."""
        grown = {
            name: value * (1 + num_steps)
            for name, value in vars(self).items()
            if isinstance(value, float) and name not in ("responses", "rewards")
        }
        return Profile(self.name, self.responses, self.rewards, **grown)


EXACT = Profile("equal bits")
PROFILES = {
    "float32": Profile("float32", 0.02, 1e-6, 1e-5, 1e-4, 1e-4, 1e-5, 1e-5, 1e-5),
    "bfloat16": Profile("bfloat16", 1.0, 1e-2, 1e-2, 1.0, 1e-2, 2e-2, 5e-2, 1e-3),
}


@dataclass(frozen=True)
class Check:
    """One comparison.

    Example: Check(3, "loss", "actor/loss", False, 2e-3, 1e-5, 1, "recorded 0.5, replayed 0.502")
    """

    step: int
    rung: str
    name: str
    ok: bool
    difference: float  # the largest one, in the unit of the rung's tolerance; infinite: cannot be compared
    allowed: float
    compared: int  # numbers
    detail: str = ""  # of a difference: where, what was recorded and what came out

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: None there."""
        return asdict(self) | {"difference": self.difference if math.isfinite(self.difference) else None}


def print_report(result: dict[str, Any], console: Console | None = None) -> None:
    """The checks of the step by rung, and the verdict."""
    console = console or Console(highlight=False)
    console.print(f"step {result['step']}; state before it: {result['state']}", soft_wrap=True)
    console.print(f"compared by: {result['profile']} ({result['why']})", soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for column in ("rung", "", "numbers", "largest difference", "allowed"):
        table.add_column(column, justify="right" if column in ("numbers", "largest difference", "allowed") else "left")
    for rung in RUNGS:
        of_rung = [check for check in result["checks"] if check["rung"] == rung and check["step"] == result["step"]]
        if fine := [check for check in of_rung if check["ok"]]:
            sums = (str(sum(check["compared"] for check in fine)), max(c["difference"] for c in fine))
            table.add_row(rung, "ok", sums[0], f"{sums[1]:.3g}", f"{max(c['allowed'] for c in fine):.3g}")
        for check in of_rung:
            if not check["ok"]:
                difference = "-" if check["difference"] is None else f"{check['difference']:.3g}"
                amounts = (str(check["compared"]), difference, f"{check['allowed']:.3g}")
                table.add_row(rung, f"[bold red]{escape(check['name'])} differs[/]", *amounts)
    console.print(table)
    for note in result["notes"]:
        console.print(note, soft_wrap=True)
    console.print(verdict(result), style="green" if result["pass"] else "bold red", soft_wrap=True)


def verdict(result: dict[str, Any]) -> str:
    """One sentence."""
    first = result["first_difference"]
    if first is None:
        exact = result["profile"] == EXACT.name
        equal = "with equal bits" if exact else f"within the tolerances of {result['profile']}"
        return f"step {result['step']} was computed again {equal}"
    detail = f" ({first['detail']})" if first["detail"] else ""
    return f"step {first['step']} differs first in its {first['rung']}: {first['name']}{detail}"


def first_difference(checks: Sequence[Check]) -> Check | None:
    """The check to look at: of the earliest step, on the first rung."""
    failed = [check for check in checks if not check.ok]
    return min(failed, key=lambda check: (check.step, RUNGS.index(check.rung)), default=None)


def compare_responses(records: Records, groups: Sequence[Group], profile: Profile) -> list[Check]:
    """Sampled again against recorded: token ids, and the log-probabilities up to the first other token."""
    differing, details, gaps = 0, [], []
    pairs = [
        (f"prompt {p}, sample {g}", old, new)
        for p, (before, after) in enumerate(zip(records.groups, groups, strict=True))
        for g, (old, new) in enumerate(zip(before.responses, after.responses, strict=True))
    ]
    for where, old, new in pairs:
        same = _common(old.token_ids, new.token_ids)
        if old.token_ids != new.token_ids:
            differing += 1
            here = [ids[same] if same < len(ids) else "the end" for ids in (old.token_ids, new.token_ids)]
            details.append(f"{where}, token {same}: recorded {here[0]}, sampled {here[1]}")
        gaps += [abs(a - b) for a, b in zip(old.logprobs[:same], new.logprobs[:same], strict=True)]
    share = differing / max(1, len(pairs))
    ids = Check(
        records.step,
        "responses",
        "share of responses that differ",
        share <= profile.responses,
        share,
        profile.responses,
        len(pairs),
        details[0] if details else "",
    )
    largest = max(gaps, default=0.0)
    allowed = profile.logprobs_max
    logprobs = Check(records.step, "responses", "rollout logprobs", largest <= allowed, largest, allowed, len(gaps))
    return [ids, logprobs]


def compare_rewards(records: Records, scores: Scores, profile: Profile) -> list[Check]:
    """Scored again against recorded: the total, and every reward function."""
    checks = [_arrays(records.step, "rewards", "total", records.rewards, scores.total, profile.rewards)]
    for name in sorted(records.parts.keys() | scores.parts.keys()):
        nothing = np.full(records.rewards.shape, np.nan)
        pair = records.parts.get(name, nothing), scores.parts.get(name, nothing)
        checks.append(_arrays(records.step, "rewards", name, *pair, profile.rewards))
    return checks


def compare_update(
    records: Records,
    recorded: Mapping[str, float],  # the step's line of metrics.jsonl
    *,
    advantages: np.ndarray,  # (P, G)
    logprobs: Mapping[str, np.ndarray | None],  # old_logprobs, ref_logprobs: (N,)
    metrics: Mapping[str, float],  # what the update reported
    profile: Profile,
) -> list[Check]:
    """The replayed update against the recorded one, up to the gradient and the learning rate."""
    step, checks = records.step, []
    for name, now in logprobs.items():
        before = getattr(records.trained, name)
        if before is None and now is None:
            continue
        checks += _logprobs(step, name, before, now, profile)
    checks.append(_arrays(step, "advantages", "advantages", records.advantages, advantages, profile.advantages))
    gone = {name: v for name, v in recorded.items() if name.startswith("actor/") and name not in metrics}
    checks += [
        Check(step, _RUNG_OF.get(name, "loss"), name, False, math.inf, 0.0, 1, f"recorded {value!r}, replayed none")
        for name, value in gone.items()
    ]
    return checks + [_metric(step, name, recorded, value, profile) for name, value in metrics.items()]


# Metrics of an update and the rung that each belongs to; all others are `loss`.
_RUNG_OF = {
    "rollout/logprob_gap_mean": "logprobs",
    "rollout/logprob_gap_max": "logprobs",
    "rollout/logprob_gap_share": "logprobs",
    "rollout/mismatch_k3": "logprobs",
    "actor/grad_norm": "gradient",
    "actor/skipped_steps": "gradient",
    "actor/lr": "learning rate",
}
_SHARES = ("rollout/logprob_gap_share", "actor/pg_clipfrac")  # a token at the limit falls on either side of it


def _metric(step: int, name: str, recorded: Mapping[str, float], now: float, profile: Profile) -> Check:
    rung = _RUNG_OF.get(name, "loss")
    if name not in recorded:
        return Check(step, rung, name, False, math.inf, 0.0, 1, f"recorded none, replayed {now!r}")
    before = recorded[name]
    allowed = {
        "logprobs": profile.logprobs_max if name == "rollout/logprob_gap_max" else profile.logprobs,
        "loss": profile.loss,
        "gradient": profile.gradient,
        "learning rate": 0.0,
    }[rung]
    if name in _SHARES and not profile.exact:
        allowed = max(allowed, 0.01)
    difference = abs(now - before)
    if rung == "gradient" and before:
        difference /= abs(before)
    same = now == before or (now != now and before != before)
    detail = "" if same else f"recorded {before!r}, replayed {now!r}"
    return Check(step, rung, name, same or difference <= allowed, 0.0 if same else difference, allowed, 1, detail)


def _logprobs(step: int, name: str, before: np.ndarray | None, now: np.ndarray | None, profile: Profile) -> list[Check]:
    if before is None or now is None:
        made = "recorded" if now is None else "replayed"
        why = f"only {made}: the objective needed them in one of the two"
        return [Check(step, "logprobs", name, False, math.inf, 0.0, 0, why)]
    if before.shape != now.shape:
        why = f"recorded {before.size} tokens, replayed {now.size}"
        return [Check(step, "logprobs", name, False, math.inf, 0.0, 0, why)]
    largest = _arrays(step, "logprobs", name, before, now, profile.logprobs_max)
    mean = float(np.mean(np.abs(np.where(before == now, 0.0, before.astype(float) - now)))) if before.size else 0.0
    allowed = profile.logprobs
    return [largest, Check(step, "logprobs", f"{name}, mean", mean <= allowed, mean, allowed, before.size)]


def _arrays(step: int, rung: str, name: str, before: np.ndarray, now: np.ndarray, allowed: float) -> Check:
    """Number by number; NaN (not scored) equals NaN alone."""
    if before.shape != now.shape:
        why = f"recorded {before.shape}, replayed {now.shape}"
        return Check(step, rung, name, False, math.inf, allowed, 0, why)
    same = (before == now) | (np.isnan(before) & np.isnan(now))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(before.astype(float) - now.astype(float)))
    difference = np.where(np.isnan(difference), np.inf, difference)  # scored in one of the two
    largest = float(difference.max(initial=0.0))
    detail = ""
    if largest > 0:
        place = np.unravel_index(int(difference.argmax()), difference.shape)
        where = f"prompt {place[0]}, sample {place[1]}" if len(place) == 2 else f"token {place[0]}"
        detail = f"{where}: recorded {before[place]!s}, replayed {now[place]!s}"
    return Check(step, rung, name, largest <= allowed, largest, allowed, int(before.size), detail)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
