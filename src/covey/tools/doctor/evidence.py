"""A run as the rules see it: series of metrics, settings, some recorded steps; and the few statistics they use.

A rule is a pure function of a RunView; it says what it saw, or None. Windows: `early` and `late` are the first and the
last third of the steps, at least three each.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from covey.config.load import load_config
from covey.config.schema import Config
from covey.findings import Severity
from covey.loggers import read_metrics
from covey.rollout.records import Records, read_records, recorded_steps, records_path

Family = Literal["reward", "policy", "length", "memory", "speed"]
MAX_RECORDS = 6  # recorded steps that are read: spread over the run; each takes a second at most


@dataclass(frozen=True)
class Series:
    """A metric over the steps that reported it."""

    name: str
    steps: np.ndarray  # (n,) int
    values: np.ndarray  # (n,) float, finite

    def __len__(self) -> int:
        return len(self.values)

    @property
    def early(self) -> np.ndarray:
        """The first third."""
        return self.values[: max(3, len(self) // 3)]

    @property
    def late(self) -> np.ndarray:
        """The last third."""
        return self.values[-max(3, len(self) // 3) :]

    @property
    def noise(self) -> float:
        """Standard deviation from step to step, free of slow change: of the differences, over the root of 2."""
        return float(np.diff(self.values).std() / math.sqrt(2)) if len(self) > 2 else 0.0

    @property
    def rise(self) -> float:
        """Mean of the last third minus mean of the first."""
        return float(self.late.mean() - self.early.mean())

    @property
    def rise_error(self) -> float:
        """Standard error of `rise`, from `noise`."""
        return self.noise * math.sqrt(1 / len(self.early) + 1 / len(self.late)) if len(self) else 0.0

    def smooth(self) -> np.ndarray:
        """Running means over a tenth of the steps, at least three; as long as there are whole windows."""
        width = min(len(self), max(3, len(self) // 10))
        return np.convolve(self.values, np.ones(width) / width, mode="valid")


@dataclass(frozen=True)
class RunView:
    """A run: what is on disk, read once.

    Example: RunView(Path("runs/mine"), config, lines=[{"step": 1, "grpo/score/mean": 0.3, ...}, ...])
    """

    directory: Path
    config: Config
    lines: Sequence[dict[str, float]]  # of metrics.jsonl
    facts: dict[str, Any] = field(default_factory=dict)  # of run.json
    records: Sequence[Records] = ()
    finished: bool = False  # summary.json is there

    @cached_property
    def steps(self) -> list[dict[str, float]]:
        """The lines of training steps."""
        return [line for line in self.lines if line["step"] > 0 and "timing/all" in line]

    def has(self, *names: str) -> bool:
        """Whether every metric was reported at least once."""
        return all(any(name in line for line in self.lines) for name in names)

    def series(self, name: str) -> Series:
        """A metric's finite values over training steps; evaluations have step 0 too."""
        source = self.lines if name.startswith("eval/") else self.steps
        pairs = [(line["step"], line[name]) for line in source if name in line and math.isfinite(line[name])]
        steps, values = np.array([p[0] for p in pairs], dtype=int), np.array([p[1] for p in pairs], dtype=float)
        return Series(name, steps, values)

    def names(self, pattern: str) -> list[str]:
        """The reported metrics that a regular expression matches as a whole."""
        known = dict.fromkeys(name for line in self.lines for name in line)
        return [name for name in known if re.fullmatch(pattern, name)]

    @cached_property
    def reward_range(self) -> tuple[float, float]:
        """Lowest and highest possible reward, from the records; else the lowest and highest that occurred."""
        ranges = [pair for record in self.records if record.trained for pair in record.trained.ranges]
        seen = (self.series("grpo/score/min").values, self.series("grpo/score/max").values)
        low, high = (float(values.min()) if values.size else 0.0 for values in (seen[0], -seen[1]))
        if not ranges:
            return low, -high
        return min(low, *(pair[0] for pair in ranges)), max(-high, *(pair[1] for pair in ranges))

    @cached_property
    def span(self) -> float:
        """Width of `reward_range`, never 0."""
        low, high = self.reward_range
        return high - low or 1.0

    def level(self, reward: float) -> float:
        """Where a reward lies in `reward_range`: 0 lowest, 1 highest."""
        return (reward - self.reward_range[0]) / self.span

    @property
    def num_responses(self) -> int:
        """Responses of a step."""
        return self.config.train.batch_size * self.config.rollout.num_samples

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a step."""
        mini = self.config.algorithm.mini_batch_size or self.config.train.batch_size
        return self.config.algorithm.epochs * (self.config.train.batch_size // mini)

    @property
    def num_prompts(self) -> int | None:
        """Training prompts, by run.json; None when it does not say."""
        text = self.facts.get("Data", {}).get("prompts", "")
        found = re.match(r"[\d,]+", text)
        return int(found[0].replace(",", "")) if found else None


@dataclass(frozen=True)
class Seen:
    """What a rule saw that should not be.

    Example: Seen("0.31 of 0.90 since step 40", step=40, plots=("grpo/score/mean",), numbers={"peak": 0.9})
    """

    found: str
    severity: Severity = "warning"
    step: int | None = None  # since when
    plots: tuple[str, ...] = ()  # metrics to show
    numbers: dict[str, Any] = field(default_factory=dict)
    fix: str = ""  # instead of the rule's, with this run's numbers


@dataclass(frozen=True)
class Rule:
    """A known cause of failure and how it shows."""

    name: str
    family: Family
    needs: tuple[str, ...]  # metrics; without them the rule is skipped
    min_steps: int  # fewer steps cannot show it
    expected: str
    why: str
    fix: str
    check: Callable[[RunView], Seen | None]


def read_run(directory: str | Path) -> RunView:
    """Read a run. ValueError that says what is missing when it is none, or has no finished step."""
    directory = Path(directory)
    metrics, config = directory / "metrics.jsonl", directory / "config.yaml"
    if not metrics.is_file() or not config.is_file():
        absent = " and ".join(path.name for path in (metrics, config) if not path.is_file())
        raise ValueError(f"{directory}: {absent} not found; give the output_dir of a run of `covey train`")
    lines = read_metrics(metrics)
    if not any(line["step"] > 0 for line in lines):
        raise ValueError(
            f"{metrics}: no finished step; there is nothing to diagnose yet (`covey doctor` looks at the host)"
        )
    facts = directory / "run.json"
    steps = recorded_steps(directory)
    chosen = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, min(MAX_RECORDS, len(steps))).astype(int))]
    return RunView(
        directory,
        load_config(config).config,
        lines,
        json.loads(facts.read_text(encoding="utf-8")) if facts.is_file() else {},
        [read_records(records_path(directory, step)) for step in chosen],
        (directory / "summary.json").is_file(),
    )


def first_step(series: Series, bad: np.ndarray) -> int | None:
    """The first step at which `bad` (n,) is true; None when it never is."""
    where = np.flatnonzero(bad)
    return int(series.steps[where[0]]) if where.size else None
