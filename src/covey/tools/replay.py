"""`covey replay RUN --step N`: compute a recorded step again, and say where it differs from its record first.

The state before the step is the newest checkpoint before it, or else the starting weights. From there the steps in
between are trained again from their records (nothing is sampled or scored), and each is compared with its record on
the way. One process, whatever the run had: then sums are of another order and a profile says what may differ.

Left out: the prompts' order and the curriculum (the record has the prompts), evaluations.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from covey.checkpoint import Checkpoints, complete
from covey.config.load import load_config
from covey.config.schema import Config, ParallelConfig, RewardConfig, RewardEntry
from covey.distributed import mesh as meshes
from covey.learner import Learner, make_learner
from covey.loggers import read_metrics
from covey.rewards.runner import Scorer
from covey.rollout.records import Records, Trained, read_records, recorded_steps, records_path
from covey.setup import (
    Parts,
    load_prompts,
    load_run_parts,
    made_on,
    make_engine,
    make_scorer,
    sampling_of,
)
from covey.tools.replay_compare import (
    EXACT,
    PROFILES,
    Check,
    Profile,
    compare_responses,
    compare_rewards,
    compare_update,
    first_difference,
)
from covey.types import StepBatch, StepStats


@dataclass(frozen=True)
class _Run:
    """A run on disk and how its step is computed again."""

    directory: Path
    config: Config
    step: int
    metrics: dict[int, dict[str, float]]

    def records(self, step: int) -> Records:
        """The step's records, with what the update added."""
        path = records_path(self.directory, step)
        if not path.exists():
            have = recorded_steps(self.directory)
            spans = f"{have[0]} to {have[-1]}, {len(have)} steps" if have else "none (logging.records was off?)"
            raise ValueError(f"{path}: no records of step {step}; recorded: {spans}")
        records = read_records(path)
        if records.trained is None:
            raise ValueError(
                f"{path}: written by an older version, without the weights of the rewards and the checksum that a "
                "replay compares; `covey show` reads it, a replay needs a run of this version"
            )
        return records


def replay(
    run: Path,
    step: int,
    *,
    rollout: bool = True,
    update: bool = True,
    device: str | None = None,
    overrides: list[str] | None = None,
) -> dict[str, Any]:
    """Compute `step` of the run in directory `run` again and compare it with its record.

    rollout: sample and score again; update: log-probabilities to weights. device: another than the run's; overrides:
    settings to change, `a.b=value`. Returns `pass`, `step`, `state` (where it started), `profile`, `why`, `checks`
    (replay_compare.Check), `first_difference` (or None), `metrics` (of the replayed update). ValueError when records,
    metrics or state are not there.
    """
    if meshes.world_size() > 1:
        raise ValueError("covey replay runs on one process, also for a run of several: start it without torchrun")
    if not (run / "config.yaml").exists():
        raise ValueError(f"{run}: no config.yaml, so not the output_dir of a run")
    lines = {int(values["step"]): values for values in read_metrics(run / "metrics.jsonl")}
    found = _Run(run, load_config(run / "config.yaml", overrides or []).config, step, lines)
    target = found.records(step)
    if step not in lines:
        raise ValueError(f"{run / 'metrics.jsonl'}: no line of step {step} to compare with; restore the file")
    assert target.trained is not None
    config = _for_replay(found.config, target.trained, device, overrides or [])
    parts = load_run_parts(config)
    if (threads := target.trained.made_on.get("threads", "")).isdigit():
        torch.set_num_threads(int(threads))  # the order of sums depends on it
    profile, why = _profile(target.trained, parts)
    scorer = make_scorer(config, parts) if rollout else _silent_scorer(config)
    with closing(scorer):
        scorer.ready()  # loading a function must not count against its time limit
        result = _replay(_Run(run, config, step, lines), target, parts, scorer, profile, rollout=rollout, update=update)
    return result | {"why": why}


def _replay(
    run: _Run, target: Records, parts: Parts, scorer: Scorer, profile: Profile, *, rollout: bool, update: bool
) -> dict[str, Any]:
    config = run.config
    learner = make_learner(config, parts, scorer)
    start, state = _restore(run, learner, parts)
    checks: list[Check] = []
    for step in range(start + 1, run.step):
        records = run.records(step)
        batch, stats = learner.learn(records.groups, records.scores())
        checks += _checks_of_update(run, records, batch, stats, learner, profile.after(step - start - 1))
    if run.step > start + 1:
        state += f", then steps {start + 1} to {run.step - 1} from their records"
    profile = profile.after(run.step - start - 1)
    notes: list[str] = []
    if rollout:
        checks += _sample_and_score(run, target, parts, scorer, profile, notes)
    metrics: dict[str, float] = {}
    if update:
        batch, stats = learner.learn(target.groups, target.scores())
        checks += _checks_of_update(run, target, batch, stats, learner, profile)
        checks += _compare_checkpoint(run, learner, parts, profile, notes)
        metrics = stats.values
    first = first_difference(checks)
    return {
        "pass": first is None,
        "step": run.step,
        "state": state,
        "profile": profile.name,
        "first_difference": None if first is None else first.as_dict(),
        "checks": [check.as_dict() for check in checks],
        "metrics": metrics,
        "notes": notes,
    }


def _for_replay(config: Config, trained: Trained, device: str | None, overrides: list[str]) -> Config:
    """The run's configuration on one process, in the numbers it was made in, with nothing answered from a cache.

    Time limits of rewards are ten times as long: a busy machine must not look like another reward.
    """
    model = config.model
    if not any(override.startswith("model.dtype=") for override in overrides):
        model = model.model_copy(update={"dtype": trained.made_on["dtype"]})
    changes: dict[str, Any] = {
        "model": model,
        "parallel": ParallelConfig(),
        "reward": _patient(config.reward).model_copy(update={"cache_path": None, "cache_bytes": 0}),
    }
    if device is not None:
        changes["device"] = device
    return config.model_copy(update=changes)


def _patient(reward: RewardConfig) -> RewardConfig:
    def entries(given: list[RewardEntry]) -> list[RewardEntry]:
        return [e.model_copy(update={"timeout_s": 10 * e.timeout_s}) if e.timeout_s else e for e in given]

    tasks = {task: entries(given) for task, given in reward.tasks.items()}
    limits = {"timeout_s": 10 * reward.timeout_s, "functions": entries(reward.functions), "tasks": tasks}
    return reward.model_copy(update=limits)


def _profile(trained: Trained, parts: Parts) -> tuple[Profile, str]:
    """Equal bits where they can be had, else what the numbers allow; and why."""
    here = made_on(parts)
    other = [
        f"{key}: {trained.made_on.get(key, 'not recorded')} then, {here.get(key, 'none')} now"
        for key in sorted(trained.made_on.keys() | here.keys())
        if trained.made_on.get(key) != here.get(key)
    ]
    if not parts.device.deterministic:
        other.insert(0, f"{parts.device.kind} adds in an order that varies")
    if not other:
        return EXACT, "same device, numbers, versions, threads and processes as the record"
    return PROFILES[here["dtype"]], "; ".join(other)


def _restore(run: _Run, learner: Learner, parts: Parts) -> tuple[int, str]:
    """Put the newest state before the step in place: (its step, what it is)."""
    before = [path for path in complete(run.directory / "checkpoints") if _step_of(path) < run.step]
    start = _step_of(before[-1]) if before else 0
    missing = [s for s in range(start + 1, run.step) if not records_path(run.directory, s).exists()]
    if missing:
        raise ValueError(
            f"step {run.step}: the newest state before it is {before[-1] if before else 'the starting weights'}, and "
            f"the records of steps {missing[:3]}... between are not there: replay a step that follows a checkpoint, or "
            "keep more of them (checkpoint.every, checkpoint.keep_last)"
        )
    if not before:
        return 0, f"the starting weights ({run.config.model.path})"
    checkpoints = Checkpoints(run.directory / "checkpoints", parts.mesh)
    learner.load_state_dict(checkpoints.load(before[-1], **learner.checkpoint_parts(saving=False)))
    return start, f"checkpoint {before[-1].name}"


def _sample_and_score(
    run: _Run, target: Records, parts: Parts, scorer: Scorer, profile: Profile, notes: list[str]
) -> list[Check]:
    """The rollout again, and the recorded responses scored again."""
    checks: list[Check] = []
    versions = sorted({response.policy_version for group in target.groups for response in group.responses})
    if versions == [parts.policy.optimizer_steps]:
        engine = make_engine(run.config, parts, load_prompts(run.config, parts.tokenizer))
        engine.load_weights(parts.policy.weights(), version=parts.policy.optimizer_steps)
        groups = engine.generate([group.prompt for group in target.groups], sampling_of(run.config, run.step))
        if run.metrics[run.step].get("rollout/rounds", 1.0) > 1 and profile.exact:
            notes.append("responses: sampled in other batches than the run's rounds, so compared as float32")
            profile_of_rollout = PROFILES["float32"]
        else:
            profile_of_rollout = profile
        checks += compare_responses(target, groups, profile_of_rollout)
    else:
        notes.append(
            f"responses: not sampled again; they were with the weights after optimizer steps {versions}, and the "
            f"restored state is after {parts.policy.optimizer_steps}"
        )
    scores = scorer.score(target.groups)
    if failed := {kind: count for kind, count in scores.counts.items() if kind in ("errors", "timeouts") and count}:
        notes.append(f"rewards: not every response was scored in the replay: {failed}")
    return checks + compare_rewards(target, scores, profile)


def _checks_of_update(
    run: _Run, records: Records, batch: StepBatch, stats: StepStats, learner: Learner, profile: Profile
) -> list[Check]:
    if records.step not in run.metrics:
        raise ValueError(f"{run.directory / 'metrics.jsonl'}: no line of step {records.step}; restore the file")
    trained = records.trained
    assert trained is not None
    found = {"old_logprobs": batch.old_logprobs, "ref_logprobs": batch.ref_logprobs}
    checks = compare_update(
        records,
        run.metrics[records.step],
        advantages=batch.advantages,
        logprobs={name: None if t is None else t.cpu().numpy() for name, t in found.items()},
        metrics=stats.values,
        profile=profile,
    )
    if profile.exact:
        now = learner.optimizer.checksum()
        detail = "" if now == trained.checksum else f"recorded {trained.checksum}, replayed {now}"
        checks.append(Check(records.step, "weights", "checksum", not detail, float(bool(detail)), 0.0, 1, detail))
    return checks


def _compare_checkpoint(run: _Run, learner: Learner, parts: Parts, profile: Profile, notes: list[str]) -> list[Check]:
    """Where bits may differ: the weights against the checkpoint of the step, when there is one."""
    path = run.directory / "checkpoints" / f"step-{run.step:06d}"
    if profile.exact:
        return []
    if path not in complete(path.parent):
        notes.append(f"weights: not compared, the run kept no checkpoint of step {run.step}")
        return []
    mine = [master.detach().clone() for master in learner.optimizer.masters]
    Checkpoints(path.parent, parts.mesh).load(path, **learner.checkpoint_parts(saving=False))
    squares = [
        ((a - b).double().square().sum(), b.double().square().sum())
        for a, b in zip(mine, (m.detach() for m in learner.optimizer.masters), strict=True)
    ]
    apart, size = (float(sum(values)) ** 0.5 for values in zip(*squares, strict=True))
    relative, allowed = apart / size, profile.weights
    count = sum(m.numel() for m in mine)
    return [Check(run.step, "weights", f"checkpoint {path.name}", relative <= allowed, relative, allowed, count)]


def _silent_scorer(config: Config) -> Scorer:
    """For the scale of recorded rewards only: no reward function is loaded."""

    def never(responses: list[str], rows: list[dict[str, Any]], options: dict[str, Any]) -> list[float | None]:
        raise AssertionError("recorded scores are not computed again")

    entries = [*config.reward.functions, *(e for several in config.reward.tasks.values() for e in several)]
    return Scorer(config.reward, local={entry.name: never for entry in entries})


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
