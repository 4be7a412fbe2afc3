"""The training run: set-up, THE LOOP, and what is written down. Read `Run.step` first, then `Learner.learn`.

One step: P prompts, G responses each, rewards, advantages, the update, the engine's new weights, records, metrics.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import yaml

from covey import preflight
from covey.algorithm.losses import find_loss
from covey.checkpoint import Checkpoints, Keep
from covey.checks.material import material_of_run
from covey.checks.preflight import failures, log_warnings, preflight_findings
from covey.config.load import LoadedConfig
from covey.config.schema import Config
from covey.credit import check_advantage
from covey.data.dataset import PromptStream
from covey.device import Device
from covey.distributed import mesh as meshes
from covey.distributed.collectives import any_true, gather_objects, max_dicts
from covey.evaluate import evaluate, passes
from covey.findings import Finding, as_json
from covey.learner import make_learner
from covey.loggers import Logger, SilentLogger, open_loggers
from covey.metrics import summarize
from covey.rewards.scores import Scores
from covey.rollout.dynamic import sample_groups
from covey.rollout.records import Trained, write_records
from covey.rollout.shared import SharedEngine, gather_scores
from covey.setup import (
    Parts,
    Prompts,
    check_tasks,
    load_prompts,
    load_run_parts,
    made_on,
    make_engine,
    make_scorer,
    sampling_of,
    stop_token_ids,
)
from covey.types import Group, StepBatch

log = logging.getLogger(__name__)


def train(loaded: LoadedConfig[Config], *, resume: bool | str | None = None, quiet: bool = False) -> dict[str, Any]:
    """Run to the end and return the summary that is also written to OUTPUT/summary.json.

    resume: None refuses a directory that holds a run; True or "auto" goes on from its newest checkpoint ("auto" also
    starts a new run where there is none); a path goes on from that checkpoint. When the user asked to stop, the
    checkpoint is written and the summary says `interrupted`.
    """
    run = Run(loaded, resume=resume, quiet=quiet)
    try:
        with _finish_step_on_interrupt() as interrupted:
            run.loop(interrupted)
        summary = run.finish(interrupted=bool(interrupted))
    finally:
        run.close()
    meshes.stop()
    return summary


class Run:
    """A run's parts and its position."""

    def __init__(self, loaded: LoadedConfig[Config], *, resume: bool | str | None, quiet: bool = False) -> None:
        config = loaded.config
        self.config = config
        self.quiet = quiet
        self.output = Path(config.output_dir)
        self._start = time.perf_counter()
        if meshes.is_main_process():
            preflight.check_output_dir(self.output, resume)
        find_loss(config.algorithm.loss)
        check_advantage(config.algorithm.advantage)
        self.parts: Parts = load_run_parts(config)
        self.scorer = make_scorer(config, self.parts)
        self.mesh = self.parts.mesh
        self.policy = self.parts.policy
        self.prompts: Prompts = load_prompts(config, self.parts.tokenizer)
        preflight.check_lengths(int(self.prompts.train.lengths.max()), config, self.policy.model.config)
        check_tasks(self.scorer, self.prompts, config.reward.task_key)
        rows = self.prompts.eval or self.prompts.train
        preflight.check_pass_on(config.evaluation.pass_on, self.scorer, rows, config.reward.task_key)
        self.engine = make_engine(config, self.parts, self.prompts)
        self.learner = make_learner(config, self.parts, self.scorer)
        self.findings = self._preflight()
        keep = Keep(last=config.checkpoint.keep_last, every=config.checkpoint.keep_every, best=config.checkpoint.best)
        self.checkpoints = Checkpoints(
            self.output / "checkpoints", self.mesh, keep=keep, background=config.checkpoint.background
        )
        self.stream = PromptStream(
            self.prompts.train,
            batch_size=config.train.batch_size,
            seed=config.seed,
            shuffle=config.data.shuffle,
            curriculum=config.data.curriculum,
        )
        self.done = 0  # finished steps
        self.saved = -1  # step of the newest checkpoint
        self.evaluations: dict[int, dict[str, float]] = {}
        if resume:
            self._resume(resume)
        self.logger: Logger = SilentLogger()
        if self.mesh.is_main:
            self._start_writing(loaded)

    def _preflight(self) -> list[Finding]:
        """Check what could go wrong before the first step; ValueError on every rank with all that would."""
        findings: list[Finding] = []
        if self.mesh.is_main:
            findings = preflight_findings(
                self.config, material_of_run(self.config, self.parts, self.prompts, self.scorer)
            )
        problem = gather_objects(failures(findings), self.mesh.world_group, what="outcome of preflight")[0]
        if problem is not None:
            raise ValueError(problem)
        log_warnings(findings)
        return findings

    def _start_writing(self, loaded: LoadedConfig[Config]) -> None:
        config = self.config
        self.output.mkdir(parents=True, exist_ok=True)
        self._describe(loaded)
        # A run resumed at its very start measures step 0 again.
        first_step = self.done + 1 if self.done else 0
        self.logger = open_loggers(
            config.logging,
            self.output,
            total_steps=config.train.steps,
            first_step=first_step,
            print_every=config.train.print_every,
        )

    def loop(self, interrupted: list[int]) -> None:
        """Steps until the last one, or until `interrupted` is filled."""
        config = self.config
        if self.done == 0 and self._evaluates(0):
            self.logger.write(0, self.evaluate(0))
        for step in range(self.done + 1, config.train.steps + 1):
            if any_true(bool(interrupted), self.mesh.world_group, what="whether to stop"):
                interrupted.append(0)  # another rank was asked to
                break
            values = self.step(step)
            self.done = step
            if self._evaluates(step):
                values |= self.evaluate(step)
            every = config.checkpoint.every
            if every and step % every == 0:
                start = time.perf_counter()
                self.save(values)
                values["timing/checkpoint"] = time.perf_counter() - start
            self.logger.write(step, values)

    def step(self, step: int) -> dict[str, float]:
        """One rollout and its update; returns the step's metrics."""
        config, algorithm, timer = self.config, self.config.algorithm, _Timer(self.parts.device)
        groups, scores, rounds = sample_groups(lambda: self._rollout(step, timer), max_rounds=algorithm.max_rounds)
        batch, stats = self.learner.learn(groups, scores, timer)
        with timer("sync"):
            self.engine.load_weights(self.policy.weights(), version=self.policy.optimizer_steps)
        timings = max_dicts(timer.finish(), self.mesh.world_group, what="timings of the step")
        if isinstance(self.engine, SharedEngine):
            timings |= self.engine.balance()
        if config.logging.records and self.mesh.is_main:
            self._record(step, scores, batch)
        update = (
            stats.values
            | rounds
            | scores.summary()
            | max_dicts(timer.memory(), self.mesh.world_group, what="memory of the step")
            | {
                "reward/errors": float(scores.counts["errors"]),
                "reward/timeouts": float(scores.counts["timeouts"]),
            }
        )
        return summarize(
            groups,
            scores.total,
            parts=scores.parts,
            advantages=batch.advantages,
            timings=timings,
            update=update,
            world_size=self.mesh.world,
        )

    def _record(self, step: int, scores: Scores, batch: StepBatch) -> None:
        """Write what the step was trained on, and what a replay compares with."""
        old, ref = batch.old_logprobs, batch.ref_logprobs
        trained = Trained(
            weights=scores.weights,
            tasks=scores.tasks,
            ranges=scores.ranges,
            old_logprobs=None if old is None else old.cpu().numpy(),
            ref_logprobs=None if ref is None else ref.cpu().numpy(),
            checksum=self.learner.optimizer.checksum() if self.mesh.world == 1 else "",  # this rank has pieces only
            made_on=made_on(self.parts),
        )
        write_records(self.output, step, batch.groups, scores.total, scores.parts, batch.advantages, trained=trained)

    def _rollout(self, step: int, timer: _Timer) -> tuple[list[Group], Scores]:
        """The next prompts, sampled and scored; the same on every rank."""
        with timer("data"):
            prompts = self.stream.next_batch()
        with timer("rollout"):
            groups = self.engine.generate(prompts, sampling_of(self.config, step), on_group=self.scorer.submit)
        with timer("non_overlap_rule_reward"):
            scores = gather_scores(self.scorer.collect(), self.mesh)
        timer.add("rule_reward", self.scorer.seconds)
        if self.stream.curriculum is not None:
            self._record_pass_rates(groups, scores)
        return groups, scores

    def _record_pass_rates(self, groups: list[Group], scores: Scores) -> None:
        """Tell the curriculum which share of each group passed."""
        evaluation = self.config.evaluation
        passed = passes(scores, threshold=evaluation.pass_threshold, pass_on=evaluation.pass_on)
        scored = ~np.isnan(scores.total)
        rates = [float(p[s].mean()) if s.any() else None for p, s in zip(passed, scored, strict=True)]
        self.stream.record([group.prompt.uid for group in groups], rates)

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out metrics; kept for the summary."""
        assert self.prompts.eval is not None
        values, groups, scores = evaluate(self.engine, self.scorer, list(self.prompts.eval), self.config, self.mesh)
        self.evaluations[step] = values
        if self.config.logging.records and self.mesh.is_main:
            no_advantages = np.full(scores.total.shape, np.nan)
            write_records(self.output / "evaluations", step, groups, scores.total, scores.parts, no_advantages)
        return values

    def save(self, metrics: dict[str, float] | None = None) -> None:
        """Write the checkpoint of the finished step; `metrics` are its values, for checkpoint.best."""
        self.checkpoints.save(
            self.done,
            tokenizer=self.parts.tokenizer,
            **self.learner.checkpoint_parts(saving=True),
            state={
                "step": self.done,
                **self.learner.state_dict(),
                "stream": self.stream.state_dict(),
                "evaluations": {str(step): values for step, values in self.evaluations.items()},
                "metrics": {k: v for k, v in (metrics or {}).items() if math.isfinite(v)},
                "config": self.config.model_dump(mode="json"),
            },
        )
        self.saved = self.done

    def finish(self, *, interrupted: bool) -> dict[str, Any]:
        """Last checkpoint, export, summary."""
        if self.saved != self.done:
            self.save()
        self.checkpoints.wait()
        summary: dict[str, Any] = {
            "steps": self.done,
            "seconds": time.perf_counter() - self._start,
            "output_dir": str(self.output),
            "checkpoint": str(self.checkpoints.complete()[-1]),
            "evaluations": {str(step): values for step, values in sorted(self.evaluations.items())},
        }
        summary["interrupted"] = interrupted
        if interrupted:
            log.warning("stopped after step %d; checkpoint %s; go on with --resume", self.done, summary["checkpoint"])
        elif self.config.checkpoint.export:
            self.policy.export(self.parts.tokenizer, self.output / "model")
            summary["model"] = str(self.output / "model")
            if self.config.lora is not None:
                self.policy.export_adapter(self.output / "adapter")
                summary["adapter"] = str(self.output / "adapter")
        if self.mesh.is_main:
            (self.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return summary

    def close(self) -> None:
        """Release files and workers."""
        self.logger.close()
        self.scorer.close()

    def _evaluates(self, step: int) -> bool:
        every = self.config.evaluation.every
        if not every or self.prompts.eval is None:
            return False
        return step % every == 0 or step == self.config.train.steps

    def _resume(self, resume: bool | str) -> None:
        parts = self.learner.checkpoint_parts(saving=False)
        if isinstance(resume, str) and resume != "auto":
            state = self.checkpoints.load(Path(resume), **parts)
        else:
            state = self.checkpoints.load_latest(**parts)
        if state is None:
            if resume == "auto":
                return
            raise ValueError(f"--resume: no complete checkpoint under {self.checkpoints.root}; start without --resume")
        preflight.warn_changed_config(state["config"], self.config.model_dump(mode="json"))
        self.learner.load_state_dict(state)
        self.stream.load_state_dict(state["stream"])
        self.evaluations = {int(step): values for step, values in state["evaluations"].items()}
        self.done = self.saved = state["step"]
        self.engine.load_weights(self.policy.weights(), version=self.policy.optimizer_steps)
        log.info("resumed after step %d from %s", self.done, state["path"])

    def _describe(self, loaded: LoadedConfig[Config]) -> None:
        """Write config.yaml and run.json, and print the start-up tables."""
        config = self.config.model_dump(mode="json")
        stops = stop_token_ids(self.config, self.parts, self.prompts)
        (self.output / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        facts = preflight.facts(
            self.config,
            device=self.parts.describe() | self.policy.parallel.describe(),
            model=self.policy.model,
            num_parameters=self.policy.parallel.num_parameters,
            num_prompts=len(self.prompts.train),
            num_eval=len(self.prompts.eval) if self.prompts.eval else 0,
            dropped=self.prompts.train.drops,
            rewards=self.scorer.ready(),
            stop_tokens={i: self.parts.tokenizer.convert_ids_to_tokens(i) for i in stops},
        )
        checks = as_json(self.findings)["findings"]
        (self.output / "run.json").write_text(
            json.dumps({"source": loaded.source, "started_at_step": self.done, **facts, "Preflight": checks}, indent=2)
            + "\n",
            encoding="utf-8",
        )
        if not self.quiet:
            preflight.print_facts(facts)
        for note in loaded.notes:
            log.warning("%s", note)


class _Timer:
    """Seconds and most memory of named parts of a step, device work included."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seconds: dict[str, float] = {}
        self._start, self._cpu_start = time.perf_counter(), time.process_time()
        device.reset_peak_memory()
        self._bytes: dict[str, int] = {"start": device.peak_memory_bytes()}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self._device.reset_peak_memory()
        yield
        self._device.synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
        self._bytes[name] = max(self._bytes.get(name, 0), self._device.peak_memory_bytes())

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere, and may run beside other parts."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def finish(self) -> dict[str, float]:
        """All parts, `all` since the timer was made, and `cpu`, the processor's seconds of this process in it."""
        return self._seconds | {
            "all": time.perf_counter() - self._start,
            "cpu": time.process_time() - self._cpu_start,
        }

    def memory(self) -> dict[str, float]:
        """Metrics `memory/*` of this rank."""
        scoring = ("old_log_p", "reference_model", "teacher_model")
        most = {
            "peak": max(self._bytes.values()),
            "start": self._bytes["start"],
            "rollout": self._bytes.get("rollout", 0),
            "scoring": max(self._bytes.get(name, 0) for name in scoring),
            "update": self._bytes.get("update", 0),
            "limit": self._device.memory_bytes()[1],
        }
        return {f"memory/{name}_bytes": float(amount) for name, amount in most.items()}


@contextmanager
def _finish_step_on_interrupt() -> Iterator[list[int]]:
    """Collect the first Ctrl-C or SIGTERM in the list it yields; the second one raises at once."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received:
            signal.default_int_handler(number, frame)
        received.append(number)
        sys.stderr.write("\nstopping after this step, then writing a checkpoint; press Ctrl-C again to stop at once\n")

    try:
        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are somebody else's
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
