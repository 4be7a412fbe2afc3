"""Runs as a trainer would have written them, with a fault in what is drawn: for `covey doctor RUN`.

Steps whose responses, rewards and timings are drawn at random go through the trainer's own summary of a step
(`metrics.summarize`), writer of metrics.jsonl and writer of records. planted_faults.py says which faults.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml

from covey.config.schema import Config
from covey.loggers import JsonlLogger
from covey.metrics import summarize
from covey.rollout.records import Trained, write_records
from covey.types import Group, Prompt, Response

P, G, STEPS = 16, 8, 40
GIB = 2.0**30

Change = Callable[[SimpleNamespace, int, float], None]  # (what is drawn, step from 1, how far the run is: 0 to 1)


@dataclass(frozen=True)
class Planted:
    """A fault: what was done, and the rules that must speak. `make(directory)` writes the run."""

    fault: str
    rules: tuple[str, ...]
    make: Callable[[Path], None]
    kind: str = "made"


def healthy_step(step: int, t: float) -> SimpleNamespace:
    """What a healthy step is drawn from: rewards rise from 0.3 to 0.8, entropy halves, a device half full."""
    return SimpleNamespace(
        level=0.3 + 0.5 * t,  # chance of a right response
        right=None,  # (P,) 0 or 1: whole groups right or wrong; None: drawn one by one
        length=200.0,
        longest=None,
        truncated=0.02,
        none=0.0,
        scale=1.0,  # of rewards
        text=None,  # of every response; None: different ones
        prompts=None,  # texts; None: different ones
        version=step - 1,
        advantages=None,
        parts={},  # further scores: name -> mean
        timings={
            "data": 0.01, "rollout": 6.0, "rule_reward": 0.2, "adv": 0.01, "old_log_p": 0.0, "reference_model": 0.5,
            "teacher_model": 0.0, "update": 3.0, "sync": 0.2,
        },
        ranks={},  # timing/rollout_imbalance and timing/rollout_slowest_rank, of several ranks
        cpu=9.0,
        memory={"start": 30.0, "rollout": 40.0, "scoring": 34.0, "update": 44.0, "limit": 80.0},
        update={
            "actor/lr": 1e-6, "actor/skipped_steps": 0.0, "actor/grad_norm": 0.4, "actor/loss": 0.01,
            "actor/pg_loss": 0.01, "actor/entropy": 0.8 - 0.4 * t, "actor/pg_clipfrac": 0.01, "actor/ppo_kl": 0.001,
            "actor/kl_loss": 0.001 + 0.01 * t, "actor/nonfinite_tokens": 0.0, "rollout/logprob_gap_mean": 1e-3,
            "rollout/logprob_gap_max": 0.05, "rollout/logprob_gap_share": 0.0, "rollout/mismatch_k3": 1e-6,
            "reward/errors": 0.0, "reward/timeouts": 0.0,
        },
    )  # fmt: skip


def make_run(
    directory: Path,
    change: Change | None = None,
    *,
    steps: int = STEPS,
    finished: bool = True,
    prompts: int = 4000,
    evaluations: Callable[[float], float] | None = None,
    **config: Any,
) -> None:
    """Write a run whose steps are healthy but for `change`.

    evaluations: how far the run is -> held-out reward, at every tenth step. config: sections of the YAML, merged over
    a healthy one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    settings = Config.model_validate(_merge(_settings(directory, steps), config))
    (directory / "config.yaml").write_text(yaml.safe_dump(settings.model_dump(mode="json")), encoding="utf-8")
    facts = {"Data": {"prompts": f"{prompts:,}"}, "Model": {"stop tokens": "<|im_end|> (151645)"}}
    (directory / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    mini = settings.algorithm.mini_batch_size or P
    updates = settings.algorithm.epochs * (P // mini)
    rng, logger = np.random.default_rng(0), JsonlLogger(directory / "metrics.jsonl")
    for step in range(1, steps + 1):
        drawn = healthy_step(step, step / steps)
        drawn.version *= updates
        if change is not None:
            change(drawn, step, step / steps)
        held_out = {} if evaluations is None or step % 10 else {"eval/reward": evaluations(step / steps)}
        _write_step(directory, logger, step, drawn, rng, record=step in (1, steps // 2, steps), held_out=held_out)
    logger.close()
    if finished:
        (directory / "summary.json").write_text("{}", encoding="utf-8")


def _settings(directory: Path, steps: int) -> dict[str, Any]:
    return {
        "model": {"path": "Qwen/Qwen2.5-7B-Instruct"},
        "data": {"train": "rows.jsonl"},
        "rollout": {"num_samples": G, "max_response_length": 512},
        "reward": {"functions": ["math"]},
        "algorithm": {"kl_coef": 0.001},
        "train": {"steps": steps, "batch_size": P, "lr": 1e-6, "warmup_fraction": 0.05},
        "output_dir": str(directory),
    }


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    return base | {k: base.get(k, {}) | v if isinstance(v, dict) else v for k, v in over.items()}


def _write_step(
    directory: Path,
    logger: JsonlLogger,
    step: int,
    drawn: SimpleNamespace,
    rng: np.random.Generator,
    *,
    record: bool,
    held_out: dict[str, float],
) -> None:
    right = rng.random((P, G)) < drawn.level if drawn.right is None else np.repeat(drawn.right[:, None], G, axis=1) > 0
    lengths = np.maximum(1, rng.normal(drawn.length, 0.1 * drawn.length, (P, G))).astype(int)
    if drawn.longest is not None:
        lengths[0, 0] = drawn.longest
    cut = rng.random((P, G)) < drawn.truncated
    rewards = np.where(rng.random((P, G)) < drawn.none, np.nan, right * drawn.scale)
    with np.errstate(invalid="ignore"):
        centred = rewards - np.nanmean(rewards, axis=1, keepdims=True)
        advantages = np.nan_to_num(centred / (np.nanstd(rewards, axis=1, keepdims=True, ddof=1) + 1e-6))
    if drawn.advantages is not None:
        advantages = advantages * drawn.advantages
    groups = [
        Group(
            Prompt(step * P + p, [5] * 50, drawn.prompts[p] if drawn.prompts else f"problem {step}.{p}"),
            [
                Response(
                    [7] * int(lengths[p, g]), [-0.5] * int(lengths[p, g]), drawn.text or f"answer {step}.{p}.{g}",
                    "length" if cut[p, g] else "stop", policy_version=drawn.version,
                )
                for g in range(G)
            ],
        )
        for p in range(P)
    ]  # fmt: skip
    noise = rng.normal(1.0, 0.03)  # of seconds, as on a quiet host
    tokens = float(lengths.mean() + 50) / 250
    grows = ("rollout", "update")  # with the tokens
    timings = {name: s * noise * (tokens if name in grows else 1) for name, s in drawn.timings.items()}
    timings |= drawn.ranks | {"all": sum(timings.values()) * 1.01, "cpu": drawn.cpu * noise * tokens}
    memory = {f"memory/{name}_bytes": size * GIB for name, size in drawn.memory.items()}
    memory["memory/peak_bytes"] = max(size for name, size in memory.items() if "limit" not in name)
    parts = {"math": rewards}
    for name, mean in drawn.parts.items():
        parts[name] = np.clip(rng.normal(mean, 0.05, (P, G)), 0, 1)
    jitter = {"actor/grad_norm": drawn.update["actor/grad_norm"] * rng.normal(1.0, 0.1)}
    update = drawn.update | jitter | memory
    values = summarize(
        groups, rewards, parts=parts, advantages=advantages, timings=timings, update=update, world_size=1
    )
    logger.write(step, values | held_out)
    if record:
        ranges = [(0.0, float(drawn.scale))] * P
        trained = Trained({"math": np.ones(P)}, [""] * P, ranges, None, None, "", {})
        write_records(directory, step, groups, rewards, parts, advantages, trained=trained)
