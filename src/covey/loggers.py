"""Where a run's metrics go: metrics.jsonl always, the console, and TensorBoard, Weights & Biases, SwanLab on request.

A step's number counts from 1; 0 stands for what was measured before the first. A resumed run removes the steps it will
run again, so that metrics.jsonl is the file of an uninterrupted run (its seconds aside). Numbers that JSON has no word
for are written as the strings "NaN", "Infinity" and "-Infinity"; `read_metrics` turns them back.
Names and definitions stand in metrics.py; a name that is not declared there is refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from covey.config.schema import LoggingConfig
from covey.metrics import check_names, mindspeed_metrics


class Logger(Protocol):
    """Takes the values of a step; steps come in order."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Report `values` (names of metrics.METRICS) of step `step`."""
        ...

    def close(self) -> None:
        """Finish files and displays; nothing is written afterwards."""
        ...


def open_loggers(
    config: LoggingConfig, output_dir: str | Path, *, total_steps: int, first_step: int = 0, print_every: int = 1
) -> Logger:
    """Every logger that `config` asks for, as one. `first_step`: the first step that will be written.

    Raises ImportError that names the extra to install when a wanted package is missing.
    """
    directory = Path(output_dir)
    upstream = config.names != "covey"
    loggers: list[Logger] = []
    installed = importlib.util.find_spec("tensorboard") is not None
    if config.tensorboard is True or (config.tensorboard == "auto" and installed):
        loggers.append(TensorBoardLogger(directory / "tensorboard", first_step=first_step))
    if config.wandb_project is not None:
        loggers.append(WandbLogger(config.wandb_project, directory))
    if config.swanlab_project is not None:
        loggers.append(SwanLabLogger(config.swanlab_project, directory))
    done = max(first_step - 1, 0)
    loggers.append(ConsoleLogger(total_steps, done=done, iterations=upstream, print_every=print_every))
    if upstream:
        names = config.names.removeprefix("mindspeed_")
        translate = partial(mindspeed_metrics, stage=names, longest=config.longest_in_tps)
        loggers = [_Translated(logger, translate) for logger in loggers]
    return _Loggers([JsonlLogger(directory / "metrics.jsonl", first_step=first_step), *loggers])


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl in order, each with `step`. A last line that a crash cut short is left out."""
    return [values for _, values in _complete_lines(Path(path))]


class JsonlLogger:
    """One JSON object a line, on disk after every write."""

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _drop_from(path, first_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line."""
        line = {"step": step} | {name: _jsonable(value) for name, value in values.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


# What the console's line shows of a step: metric, label, format; in this order, where present.
_COLUMNS = (
    ("grpo/score/mean", "reward", ".3f"),
    ("sft/loss", "loss", ".4f"),
    ("response_length/mean", "length", ".1f"),
    ("rollout/truncated_share", "truncated", ".0%"),
    ("group/zero_variance_share", "no-spread", ".0%"),
    ("actor/entropy", "entropy", ".3f"),
    ("actor/kl_loss", "kl", ".2e"),
    ("distill/kl", "teacher kl", ".3f"),
    ("actor/pg_clipfrac", "clipped", ".1%"),
    ("rollout/logprob_gap_max", "gap", ".0e"),
    ("actor/grad_norm", "grad", ".3g"),
    ("actor/lr", "lr", ".2g"),
    ("e2e_tps", "tok/s", ".0f"),
    ("timing/all", "s", ".2f"),
    ("eval/reward", "eval reward", ".3f"),
    ("eval/pass@1", "eval pass@1", ".3f"),
)


class ConsoleLogger:
    """One line a step on standard error, above a progress bar when that is a terminal. NO_COLOR is honoured."""

    def __init__(
        self,
        total_steps: int,
        *,
        done: int = 0,
        console: Console | None = None,
        iterations: bool = False,
        print_every: int = 1,
    ) -> None:
        """iterations: MindSpeed-RL's form of the line, with every value. print_every: steps from line to line."""
        self._iterations = iterations
        self._print_every = print_every
        self._console = console or Console(stderr=True)
        self._total = total_steps
        self._progress: Progress | None = None
        if self._console.is_terminal:
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task("steps", total=total_steps, completed=done)
            self._progress.start()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Print the step's line, when it is its turn, and move the bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
        evaluated = any(name.startswith("eval/") for name in values)
        if step % self._print_every and step not in (1, self._total) and not evaluated:
            return
        if self._iterations:
            line = " | ".join([f"iteration: {step} / {self._total}", *(f"{k} : {v:.4g}" for k, v in values.items())])
        else:
            line = f"step {step:>{len(str(self._total))}}/{self._total}  {describe(values)}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()


def describe(values: Mapping[str, float]) -> str:
    """The values that the console shows, as `label value  label value`; every value when it knows none of them."""
    shown = [f"{label} {values[name]:{form}}" for name, label, form in _COLUMNS if name in values]
    return "  ".join(shown or [f"{name} {value:.4g}" for name, value in values.items()])


class TensorBoardLogger:
    """TensorBoard events, tag `train/<name>`, or `eval/...` as it is."""

    def __init__(self, directory: Path, *, first_step: int = 0) -> None:
        _import("tensorboard", extra="tensorboard")
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(directory), purge_step=first_step or None)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name if name.startswith("eval/") else f"train/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbLogger:
    """A Weights & Biases run; a resumed training goes on in the same one."""

    def __init__(self, project: str, output_dir: Path) -> None:
        wandb = _import("wandb", extra="wandb")
        self._run = wandb.init(
            project=project, name=output_dir.name, dir=str(output_dir), id=_run_id(output_dir, "wandb"), resume="allow"
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class SwanLabLogger:
    """A SwanLab experiment; a resumed training goes on in the same one."""

    def __init__(self, project: str, output_dir: Path) -> None:
        swanlab = _import("swanlab", extra="swanlab")
        self._run = swanlab.init(
            project=project,
            experiment_name=output_dir.name,
            logdir=str(output_dir / "swanlab"),
            id=_run_id(output_dir, "swanlab"),
            resume="allow",
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the experiment."""
        self._run.finish()


class SilentLogger:
    """Takes everything and reports nothing: the ranks beside the first."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class _Translated:
    def __init__(self, logger: Logger, translate: Callable[[Mapping[str, float]], Mapping[str, float]]) -> None:
        self._logger = logger
        self._translate = translate
        self.close = logger.close

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._logger.write(step, self._translate(values))


class _Loggers:
    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = loggers

    def write(self, step: int, values: Mapping[str, float]) -> None:
        check_names(values)
        for logger in self._loggers:
            logger.write(step, values)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()


def _import(name: str, *, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"logging to {name} needs the package {name}, which cannot be imported ({error}); "
            f"install it with: pip install 'covey[{extra}]', or take it out of `logging`"
        ) from error


def _run_id(output_dir: Path, service: str) -> str:
    """The id of this directory's run at a service: random, made once, kept in a file."""
    path = output_dir / f"{service}_run_id"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex[:21], encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _jsonable(value: float) -> float | str:
    value = float(value)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _drop_from(path: Path, first_step: int) -> None:
    """Cut the file before the first line of step `first_step` or later, and before a line cut short."""
    keep = 0
    for end, values in _complete_lines(path):
        if values["step"] >= first_step:
            break
        keep = end
    with path.open("r+b") as file:
        file.truncate(keep)


def _complete_lines(path: Path) -> list[tuple[int, dict[str, float]]]:
    """(offset of the line's end, its values) of each line that ends in a newline."""
    lines: list[tuple[int, dict[str, float]]] = []
    end = 0
    for number, raw in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not raw.endswith(b"\n"):
            break
        end += len(raw)
        try:
            values = json.loads(raw)
            step = int(values.pop("step"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}:{number}: not a line of metrics ({error!r}); restore the file, or remove the line"
            ) from error
        lines.append((end, {"step": step} | {name: float(value) for name, value in values.items()}))
    return lines
