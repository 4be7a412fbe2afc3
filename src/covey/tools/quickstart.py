"""`covey quickstart`: a small model, taught sums, differences and a little Python by GRPO, from nothing and offline.

OUT is an ordinary run: the configuration in OUT/grpo.yaml, metrics, records and checkpoints beside it. The model first
imitates demonstrations of which most are flawed (OUT/sft.yaml); more of them would teach it the same
faults. What GRPO adds shows on held-out problems, which are in neither of the two.
"""

from __future__ import annotations

import json as json_module
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from covey import sft, trainer
from covey.config.load import load_config
from covey.config.schema import SftRunConfig
from covey.loggers import read_metrics
from covey.rewards.sandbox import Sandbox
from covey.rollout.records import Records, read_records, records_path
from covey.tools import tiny

MARKER = "QUICKSTART"
_EVERY = 20  # steps between evaluations

_SFT = Template("""\
# The cold start of the quickstart: covey sft $file
model: {path: $start, dtype: float32}
sft: {data: $data}
train:
  steps: $steps
  print_every: 50
  batch_size: 32
  lr: 4e-3
  schedule: linear
  warmup_steps: 20
output_dir: $output
seed: $seed
""")

_GRPO = Template("""\
# GRPO of the quickstart. Again, with another learning rate:
#   covey train $file --set output_dir=runs/mine --set train.lr=1e-4
model:
  path: $model              # what the cold start wrote
  dtype: float32
data:
  train: $train
  eval: $eval               # held out: in no other file
  prompt_key: problem
  response_key: answer
  max_prompt_length: 16
rollout:
  num_samples: 8            # responses per prompt
  max_response_length: 40
reward:                     # by the column `task`
  tasks:
    default:
      - name: math
        options: {weights: {format: 0.2, reasoning: 0.2, answer: 0.6}, num_steps: 2}
${code}algorithm:
  loss: grpo
  advantage: group_norm
train:
  steps: $steps
  print_every: 5
  batch_size: 16            # prompts per step
  lr: 3e-4
  warmup_steps: 5
evaluation:
  every: $every
  num_samples: 2
  pass_threshold: 0.6       # no response reaches it without the right answer
output_dir: $output
seed: $seed
""")

_CODE = """\
    code:                   # the program is run against the row's tests, in a sandbox
      - {name: code, weight: 0.8}
      - {name: format, weight: 0.2}
"""


def run(out: Path, seed: int = 0, *, json: bool = False, sft_steps: int = 450, steps: int = 100) -> dict[str, Any]:
    """Make everything under `out`, train, and return the summary that is also in OUT/summary.json.

    An earlier quickstart in `out` is replaced; any other content is a ValueError. json: print no report on stdout.
    """
    start = time.perf_counter()
    console = Console(quiet=json, highlight=False)
    _clear(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).write_text("Made by `covey quickstart`; the next one replaces this directory.\n", encoding="utf-8")
    tiny.make_model(out / "start", seed)
    tasks = _tasks(console)
    files = tiny.make_data(out / "data", seed, tasks)
    values = {"seed": seed, "start": out / "start", "data": files.sft, "output": out / "sft", "steps": sft_steps}
    console.print(f"[bold]1. Cold start[/bold]: {sft_steps} steps on demonstrations, most of them flawed")
    sft.run(load_config(_write(out / "sft.yaml", _SFT, values), schema=SftRunConfig))
    values = {"seed": seed, "model": out / "sft" / "model", "output": out, "steps": steps, "every": _EVERY}
    values |= {"train": files.train, "eval": files.eval, "code": _CODE if "code" in tasks else ""}
    console.print(f"[bold]2. GRPO[/bold]: {steps} steps of 16 problems x 8 responses")
    trained = trainer.train(load_config(_write(out / "grpo.yaml", _GRPO, values)), quiet=True)
    if trained.get("interrupted"):
        raise KeyboardInterrupt
    summary = _summary(out, trained["evaluations"], seconds=time.perf_counter() - start, seed=seed)
    (out / "summary.json").write_text(json_module.dumps(summary, indent=2) + "\n", encoding="utf-8")
    _report(console, out, summary)
    return summary


def _tasks(console: Console) -> list[str]:
    """All tasks; those without programs on a machine that cannot isolate them."""
    try:
        Sandbox("isolated")
    except ValueError as error:
        console.print(f"[yellow]Without the task `code`: {escape(str(error))}[/yellow]")
        return [task for task in tiny.TASKS if task != "code"]
    return list(tiny.TASKS)


def sparkline(values: Iterable[float], *, low: float, high: float, width: int = 28) -> str:
    """Means of `width` (or fewer) equal parts as block characters: `low` the lowest, `high` the highest block."""
    parts = np.array_split(np.asarray(list(values), dtype=float), width)
    blocks = "▁▂▃▄▅▆▇█"
    levels = [(part.mean() - low) / (high - low) * len(blocks) for part in parts if part.size]
    return "".join(blocks[int(np.clip(level, 0, len(blocks) - 1))] for level in levels)


def _clear(out: Path) -> None:
    """Remove an earlier quickstart, and nothing else."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"--out {out} is a file; choose a directory")
    entries = list(out.iterdir())
    if entries and not (out / MARKER).is_file():
        raise ValueError(f"--out {out}: {entries[0].name} is not of an earlier quickstart; choose another directory")
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _write(path: Path, template: Template, values: dict[str, Any]) -> Path:
    spelled = {key: json_module.dumps(str(v)) if isinstance(v, Path) else v for key, v in values.items()}
    path.write_text(template.substitute(spelled, file=path), encoding="utf-8")
    return path


def _summary(out: Path, evaluations: dict[str, dict[str, float]], *, seconds: float, seed: int) -> dict[str, Any]:
    first, last = min(evaluations, key=int), max(evaluations, key=int)
    before, after = (read_records(records_path(out / "evaluations", int(step))) for step in (first, last))
    return {
        "seconds": seconds,
        "steps": int(last),
        "heldout_reward_before": evaluations[first]["eval/reward"],
        "heldout_reward_after": evaluations[last]["eval/reward"],
        "pass1_before": evaluations[first]["eval/pass@1"],
        "pass1_after": evaluations[last]["eval/pass@1"],
        "seed": seed,
        "tasks": {
            task: {
                "heldout_reward_before": _task_reward(before, task),
                "heldout_reward_after": _task_reward(after, task),
            }
            for task in dict.fromkeys(group.prompt.row["task"] for group in before.groups)
        },
        "model": str(out / "model"),
    }


def _task_reward(records: Records, task: str) -> float:
    """Mean reward of a task's responses; NaN when the step has none."""
    chosen = [group.prompt.row["task"] == task for group in records.groups]
    return float(np.nanmean(records.rewards[chosen])) if any(chosen) else float("nan")


def _report(console: Console, out: Path, summary: dict[str, Any]) -> None:
    """What was learned, an example, and where to go on."""
    steps = summary["steps"]
    rewards = [values["grpo/score/mean"] for values in read_metrics(out / "metrics.jsonl") if values["step"] > 0]
    records = [read_records(records_path(out, step)) for step in range(1, steps + 1)]
    curves = {task: [_task_reward(record, task) for record in records] for task in summary["tasks"]}
    low = 0.9 * min(rewards)
    table = Table(title="Reward while training, and on held-out problems", title_justify="left")
    for column in ("task", f"steps 1 to {steps}", "before", "after"):
        table.add_column(column, justify="left" if column[0] in "ts" else "right")
    lines = {"all": (rewards, summary)} | {task: (curves[task], summary["tasks"][task]) for task in curves}
    for name, (curve, numbers) in lines.items():
        held_out = [f"{numbers[f'heldout_reward_{when}']:.3f}" for when in ("before", "after")]
        table.add_row(name, sparkline([v for v in curve if v == v], low=low, high=1.0), *held_out)
    table.add_row("right answers (pass@1)", "", f"{summary['pass1_before']:.3f}", f"{summary['pass1_after']:.3f}")
    console.print(table)
    before, after = (read_records(records_path(out / "evaluations", step)) for step in (0, steps))
    prompt = int(np.argmax(np.nanmean(after.rewards - before.rewards, axis=1)))
    console.print(f"A held-out problem, [bold]{before.groups[prompt].prompt.text}[/bold]")
    for name, found in (("before", before), ("after", after)):
        console.print(f"  {name:<7}{escape(found.groups[prompt].responses[0].text.replace(chr(10), '  '))}")
    console.print(
        f"\nDone in {summary['seconds']:.0f} s. The trained model is {summary['model']}; configuration, metrics, every "
        f"response and the checkpoint are in {out}. Go on with\n"
        f"  covey show {out} --step {steps}\n"
        f"  covey train {out / 'grpo.yaml'} --set output_dir=runs/mine --set seed=1",
        soft_wrap=True,
    )
