"""The training run: set-up, THE LOOP, and what is written down. Read `Run.step` first.

One step: P prompts, G responses each, rewards, advantages, the update, the engine's new weights, records, metrics.
"""

from __future__ import annotations

import json
import logging
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

from covey import checkpoint, preflight
from covey.algorithm.advantages import ADVANTAGES
from covey.algorithm.losses import LOSSES
from covey.config.load import LoadedConfig
from covey.config.schema import Config
from covey.data.dataset import PromptStream
from covey.evaluate import evaluate
from covey.loggers import Logger, open_loggers
from covey.metrics import summarize
from covey.models.load import export_model
from covey.optim import Optimizer, learning_rate
from covey.rewards.runner import Scorer
from covey.rollout.engine import Sampling
from covey.rollout.records import write_records
from covey.setup import Parts, Prompts, load_parts, load_prompts, load_reference, make_engine, stop_token_ids
from covey.types import StepBatch

log = logging.getLogger(__name__)


def train(loaded: LoadedConfig[Config], *, resume: bool | str | None = None, quiet: bool = False) -> dict[str, Any]:
    """Run to the end and return the summary that is also written to OUTPUT/summary.json.

    resume: None refuses a directory that holds a run; True or "auto" goes on from its newest checkpoint ("auto" also
    starts a new run where there is none); a path goes on from that checkpoint. KeyboardInterrupt after the checkpoint
    is written when the user asked to stop.
    """
    run = Run(loaded, resume=resume, quiet=quiet)
    try:
        with _finish_step_on_interrupt() as interrupted:
            run.loop(interrupted)
        return run.finish(interrupted=bool(interrupted))
    finally:
        run.close()


class Run:
    """A run's parts and its position."""

    def __init__(self, loaded: LoadedConfig[Config], *, resume: bool | str | None, quiet: bool = False) -> None:
        config = loaded.config
        self.config = config
        self.quiet = quiet
        self.output = Path(config.output_dir)
        self._start = time.perf_counter()
        preflight.check_output_dir(self.output, resume)
        preflight.check_name("algorithm.loss", config.algorithm.loss, LOSSES)
        preflight.check_name("algorithm.advantage", config.algorithm.advantage, ADVANTAGES)
        self.scorer = Scorer(config.reward, max_response_length=config.rollout.max_response_length)
        self.parts: Parts = load_parts(
            config.model, config.train, kind=config.device, temperature=config.rollout.temperature
        )
        self.policy = self.parts.policy
        self.prompts: Prompts = load_prompts(config, self.parts.tokenizer)
        preflight.check_lengths(int(self.prompts.train.lengths.max()), config, self.policy.model.config)
        self.engine = make_engine(config, self.parts, self.prompts)
        self.ref = load_reference(config, self.parts) if config.algorithm.kl_coef else None
        self.optimizer = Optimizer(self.policy.model.parameters(), config.train)
        self.stream = PromptStream(
            self.prompts.train,
            batch_size=config.train.batch_size,
            seed=config.seed,
            shuffle=config.data.shuffle,
        )
        mini = config.algorithm.mini_batch_size or config.train.batch_size
        self.total_optimizer_steps = config.train.steps * config.algorithm.epochs * (config.train.batch_size // mini)
        self.done = 0  # finished steps
        self.saved = -1  # step of the newest checkpoint
        self.evaluations: dict[int, dict[str, float]] = {}
        if resume:
            self._resume(resume)
        self.output.mkdir(parents=True, exist_ok=True)
        self._describe(loaded)
        # A run resumed at its very start measures step 0 again.
        first_step = self.done + 1 if self.done else 0
        self.logger: Logger = open_loggers(
            config.logging, self.output, total_steps=config.train.steps, first_step=first_step
        )

    def loop(self, interrupted: list[int]) -> None:
        """Steps until the last one, or until `interrupted` is filled."""
        config = self.config
        if self.done == 0 and self._evaluates(0):
            self.logger.write(0, self.evaluate(0))
        for step in range(self.done + 1, config.train.steps + 1):
            if interrupted:
                break
            values = self.step(step)
            self.done = step
            if self._evaluates(step):
                values |= self.evaluate(step)
            every = config.checkpoint.every
            if every and step % every == 0:
                start = time.perf_counter()
                self.save()
                values["timing/checkpoint"] = time.perf_counter() - start
            self.logger.write(step, values)

    def step(self, step: int) -> dict[str, float]:
        """One rollout and its update; returns the step's metrics."""
        config, algorithm, timer = self.config, self.config.algorithm, _Timer(self.parts.device.synchronize)
        prompts = self.stream.next_batch()
        with timer("rollout"):
            groups = self.engine.generate(prompts, self._sampling(step), on_group=self.scorer.submit)
        with timer("rule_reward"):
            scores = self.scorer.collect()
        with timer("adv"):
            advantages = ADVANTAGES[algorithm.advantage](scores.total, eps=algorithm.advantage_eps)
        batch = StepBatch(groups, scores.total, advantages)
        with timer("old_log_p"):
            if self.policy.needs_old_logprobs(algorithm, len(groups)):
                batch.old_logprobs = self.policy.logprobs(groups)
        with timer("reference_model"):
            if self.ref is not None:
                batch.ref_logprobs = self.ref.logprobs(groups)
        with timer("update"):
            stats = self.policy.update(
                batch,
                algorithm,
                optimizer=self.optimizer,
                lr=lambda i: learning_rate(i, config.train, self.total_optimizer_steps),
                max_response_length=config.rollout.max_response_length,
            )
        with timer("sync"):
            self.engine.load_weights(self.policy.weights(), version=self.policy.optimizer_steps)
        timings = timer.finish()
        if config.logging.records:
            write_records(self.output, step, groups, scores.total, scores.parts, advantages)
        update = stats.values | {
            "memory/peak_bytes": float(self.parts.device.peak_memory_bytes()),
            "reward/errors": float(scores.counts["errors"] + scores.counts["timeouts"]),
        }
        return summarize(
            groups,
            scores.total,
            parts=scores.parts,
            advantages=advantages,
            timings=timings,
            update=update,
            world_size=1,
        )

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out metrics; kept for the summary."""
        assert self.prompts.eval is not None
        values, groups, scores = evaluate(self.engine, self.scorer, list(self.prompts.eval), self.config)
        self.evaluations[step] = values
        if self.config.logging.records:
            no_advantages = np.full(scores.total.shape, np.nan)
            write_records(self.output / "evaluations", step, groups, scores.total, scores.parts, no_advantages)
        return values

    def save(self) -> None:
        """Write the checkpoint of the finished step."""
        checkpoint.save(
            self.output / "checkpoints",
            self.done,
            model=self.policy.model,
            tokenizer=self.parts.tokenizer,
            optimizer=self.optimizer.state_dict(),
            state={
                "step": self.done,
                "optimizer_steps": self.policy.optimizer_steps,
                "stream": self.stream.state_dict(),
                "evaluations": {str(step): values for step, values in self.evaluations.items()},
                "config": self.config.model_dump(mode="json"),
            },
            keep_last=self.config.checkpoint.keep_last,
        )
        self.saved = self.done

    def finish(self, *, interrupted: bool) -> dict[str, Any]:
        """Last checkpoint, export, summary."""
        if self.saved != self.done:
            self.save()
        summary: dict[str, Any] = {
            "steps": self.done,
            "seconds": time.perf_counter() - self._start,
            "output_dir": str(self.output),
            "checkpoint": str(checkpoint.complete(self.output / "checkpoints")[-1]),
            "evaluations": {str(step): values for step, values in sorted(self.evaluations.items())},
        }
        if interrupted:
            raise KeyboardInterrupt(
                f"stopped after step {self.done}; checkpoint {summary['checkpoint']}; go on with --resume"
            )
        if self.config.checkpoint.export:
            export_model(self.policy.model, self.parts.tokenizer, self.output / "model")
            summary["model"] = str(self.output / "model")
        (self.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        return summary

    def close(self) -> None:
        """Release files and workers."""
        self.logger.close()
        self.scorer.close()

    def _sampling(self, step: int) -> Sampling:
        rollout = self.config.rollout
        return Sampling(
            num_samples=rollout.num_samples,
            max_response_length=rollout.max_response_length,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
            seed=self.config.seed,
            step=step,
        )

    def _evaluates(self, step: int) -> bool:
        every = self.config.evaluation.every
        if not every or self.prompts.eval is None:
            return False
        return step % every == 0 or step == self.config.train.steps

    def _resume(self, resume: bool | str) -> None:
        root = self.output / "checkpoints"
        if isinstance(resume, str) and resume != "auto":
            found = checkpoint.load(Path(resume), self.policy.model)
        else:
            found = checkpoint.load_latest(root, self.policy.model)
        if found is None:
            if resume == "auto":
                return
            raise ValueError(f"--resume: no complete checkpoint under {root}; start without --resume")
        state = found.state
        preflight.warn_changed_config(state["config"], self.config.model_dump(mode="json"))
        self.optimizer.load_state_dict(found.optimizer)
        self.policy.optimizer_steps = state["optimizer_steps"]
        self.stream.load_state_dict(state["stream"])
        self.evaluations = {int(step): values for step, values in state["evaluations"].items()}
        self.done = self.saved = state["step"]
        self.engine.load_weights(self.policy.weights(), version=self.policy.optimizer_steps)
        log.info("resumed after step %d from %s", self.done, found.path)

    def _describe(self, loaded: LoadedConfig[Config]) -> None:
        """Write config.yaml and run.json, and print the start-up tables."""
        config = self.config.model_dump(mode="json")
        stops = stop_token_ids(self.config, self.parts, self.prompts)
        (self.output / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        facts = preflight.facts(
            self.config,
            device=self.parts.device.describe(),
            model=self.policy.model,
            num_prompts=len(self.prompts.train),
            num_eval=len(self.prompts.eval) if self.prompts.eval else 0,
            dropped=self.prompts.train.drops,
            stop_tokens={i: self.parts.tokenizer.convert_ids_to_tokens(i) for i in stops},
        )
        (self.output / "run.json").write_text(
            json.dumps({"source": loaded.source, "started_at_step": self.done, **facts}, indent=2) + "\n",
            encoding="utf-8",
        )
        if not self.quiet:
            preflight.print_facts(facts)
        for note in loaded.notes:
            log.warning("%s", note)


class _Timer:
    """Seconds of named parts of a step, device work included."""

    def __init__(self, synchronize: Any) -> None:
        self._synchronize = synchronize
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._synchronize()
        self._seconds[name] = time.perf_counter() - start

    def finish(self) -> dict[str, float]:
        """All parts, and `all` since the timer was made."""
        return self._seconds | {"all": time.perf_counter() - self._start}


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
