"""`covey align curves RUN_A RUN_B`: do two whole runs learn alike: loss, reward, entropy, length over their steps.

The published bars for GPU against Ascend are a mean relative error of 2 % for the loss of supervised training and 4 %
for the reward of GRPO. Entropy and length have no published bar: 4 %, as the reward, since they move with it.

    error = mean over common steps of |b - a| / max(|a|, floor)          on curves smoothed over `window` steps

The floor keeps steps near zero from deciding: it is a tenth of the mean |a| over the steps. Where that mean is itself
below `near_zero` (the loss of an on-policy GRPO step is 0 up to rounding) no relative error has a meaning: there the
absolute one must stay below 0.01, the gate of MindSpeed-RL's own tests. Left out: which of two unlike runs is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from covey.loggers import read_metrics

_FLOOR = 0.1  # of the mean |a|
_ABSOLUTE = 0.01  # mean |b - a| allowed where a is about 0


@dataclass(frozen=True)
class Bar:
    """A curve and how far it may be off."""

    curve: str
    metrics: tuple[str, ...]  # the first that both runs have
    allowed: float  # mean relative error
    near_zero: float  # mean |a| below which only the absolute error counts


BARS = (
    Bar("loss", ("sft/loss", "actor/loss"), 0.02, 1e-2),
    Bar("reward", ("grpo/score/mean",), 0.04, 1e-3),
    Bar("entropy", ("actor/entropy",), 0.04, 1e-3),
    Bar("length", ("response_length/mean",), 0.04, 1e-3),
)


@dataclass(frozen=True)
class Curve:
    """What was found for one of BARS."""

    curve: str
    metric: str
    passed: bool
    error: float  # mean relative, or mean absolute
    allowed: float
    kind: str  # relative | absolute
    steps: int
    mean_a: float
    mean_b: float
    bias: float  # mean of b - a: one-sided or not


def curves(run_a: Path, run_b: Path, *, window: int = 5) -> dict[str, Any]:
    """{"pass", "window", "steps", "curves": [...], "series": {curve: {"step", "a", "b"}}} of two runs' metrics.

    ValueError when a run has no metrics, no step is in both, or no curve is.
    """
    if window < 1:
        raise ValueError(f"--window {window}: a mean over at least 1 step")
    a, b = (_lines(run) for run in (run_a, run_b))
    common = sorted(a.keys() & b.keys())
    if not common:
        raise ValueError(f"{run_a} has steps {_span(a)}, {run_b} has {_span(b)}: none in both, so nothing to compare")
    found: list[Curve] = []
    series: dict[str, dict[str, list[float]]] = {}
    for bar in BARS:
        metric = next((m for m in bar.metrics if any(m in a[s] and m in b[s] for s in common)), None)
        if metric is None:
            continue
        steps = [s for s in common if metric in a[s] and metric in b[s]]
        x, y = (np.array([run[s][metric] for s in steps], dtype=np.float64) for run in (a, b))
        found.append(_compare(bar, metric, smooth(x, window), smooth(y, window)))
        series[bar.curve] = {"step": [float(s) for s in steps], "a": x.tolist(), "b": y.tolist()}
    if not found:
        known = ", ".join(metric for bar in BARS for metric in bar.metrics)
        raise ValueError(f"{run_a} and {run_b} have none of {known} in common")
    return {
        "pass": all(curve.passed for curve in found),
        "window": window,
        "steps": len(common),
        "curves": [{"pass": c.passed} | {k: v for k, v in asdict(c).items() if k != "passed"} for c in found],
        "series": series,
    }


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` values, over fewer at the start."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _compare(bar: Bar, metric: str, a: np.ndarray, b: np.ndarray) -> Curve:
    size = float(np.abs(a).mean())
    relative = size >= bar.near_zero
    if relative:
        error = float((np.abs(b - a) / np.maximum(np.abs(a), _FLOOR * size)).mean())
    else:
        error = float(np.abs(b - a).mean())
    allowed = bar.allowed if relative else _ABSOLUTE
    return Curve(
        curve=bar.curve,
        metric=metric,
        passed=error <= allowed,  # NaN passes nothing
        error=error,
        allowed=allowed,
        kind="relative" if relative else "absolute",
        steps=len(a),
        mean_a=float(a.mean()),
        mean_b=float(b.mean()),
        bias=float((b - a).mean()),
    )


def _lines(run: Path) -> dict[int, dict[str, float]]:
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.exists():
        raise ValueError(f"{path}: not there; give the output_dir of a run, or its metrics.jsonl")
    return {int(line["step"]): line for line in read_metrics(path) if line["step"] > 0}


def _span(steps: Sequence[int] | dict[int, Any]) -> str:
    found = sorted(steps)
    return f"{found[0]} to {found[-1]}" if found else "none"
