"""`covey show RUN --step N`: what a step sampled, each prompt with its responses, rewards and advantages side by side.

Reads the records that `covey train` wrote (rollout/records.py); loads no model. Long texts are cut in the middle,
because an answer stands at its end; one prompt (`--prompt`) is shown whole.
"""

from __future__ import annotations

import json as json_module
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from covey.findings import plain
from covey.rollout.records import Records, read_records, recorded_steps, records_path

_SHORT = 400  # characters of a text when several prompts are shown


def show(
    run: str | Path,
    step: int | None = None,
    *,
    json: bool = False,
    prompt: int | None = None,
    limit: int = 4,
    console: Console | None = None,
) -> None:
    """Print a step's groups on stdout; `step` None: the last recorded one, `limit` 0: every prompt.

    Raises ValueError that says what there is, when the run, the step or the prompt does not exist.
    """
    records = load(run, step)
    num_prompts = len(records.groups)
    if prompt is not None and not 0 <= prompt < num_prompts:
        raise ValueError(f"step {records.step} has prompts 0 to {num_prompts - 1}, no prompt {prompt}")
    chosen = [prompt] if prompt is not None else list(range(num_prompts))[: limit or None]
    if json:
        sys.stdout.write(json_module.dumps(as_json(records, chosen), ensure_ascii=False, allow_nan=False) + "\n")
        return
    console = console or Console()
    console.print(_headline(records))
    for p in chosen:
        console.print(_group(records, p, max_chars=None if prompt is not None else _SHORT))
    if prompt is None and len(chosen) < num_prompts:
        console.print(f"{len(chosen)} of {num_prompts} prompts; --limit 0 shows all, --prompt N one of them whole")


def load(run: str | Path, step: int | None = None) -> Records:
    """The records of a step of a run, of the last one when `step` is None; ValueError if there are none."""
    if not Path(run).is_dir():
        raise ValueError(f"{run}: no such directory; give the output_dir of a run")
    steps = recorded_steps(run)
    if not steps:
        raise ValueError(
            f"{run}: no records of rollouts in {Path(run) / 'rollouts'}; "
            "a run writes them when logging.records is true and it has finished a step"
        )
    if step is not None and step not in steps:
        raise ValueError(f"{run}: step {step} is not recorded; there are {_ranges(steps)}")
    return read_records(records_path(run, steps[-1] if step is None else step))


def as_json(records: Records, prompts: Sequence[int]) -> dict[str, Any]:
    """The chosen prompts of a step as plain JSON values; what is not scored or not finite is null."""
    return {
        "step": records.step,
        "num_prompts": len(records.groups),
        "groups": [_group_json(records, p) for p in prompts],
    }


def _group_json(records: Records, p: int) -> dict[str, Any]:
    group = records.groups[p]
    responses = [
        {
            "text": response.text,
            "num_tokens": len(response.token_ids),
            "finish_reason": response.finish_reason,
            "policy_version": response.policy_version,
            "reward": plain(records.rewards[p, g]),
            "scores": {name: plain(scores[p, g]) for name, scores in records.parts.items()},
            "advantage": plain(records.advantages[p, g]),
            "mean_logprob": plain(float(np.mean(response.logprobs))) if response.logprobs else None,
        }
        for g, response in enumerate(group.responses)
    ]
    row = plain(group.prompt.row)
    return {"prompt": p, "uid": group.prompt.uid, "text": group.prompt.text, "row": row, "responses": responses}


def _headline(records: Records) -> str:
    responses = [response for group in records.groups for response in group.responses]
    known = records.rewards[~np.isnan(records.rewards)]
    mean = f"mean reward {known.mean():.3f}" if known.size else "nothing scored"
    tokens = sum(len(response.token_ids) for response in responses) / max(len(responses), 1)
    counts = f"{len(records.groups)} prompts, {len(responses)} responses"
    return f"step {records.step}: {counts}, {mean}, mean length {tokens:.1f}"


def _group(records: Records, p: int, *, max_chars: int | None) -> Panel:
    """A prompt over the table of its responses."""
    group = records.groups[p]
    table = Table(box=SIMPLE, expand=True, show_edge=False, padding=(0, 1))
    for name in ("#", "reward", *(_printable(name) for name in records.parts), "adv", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("response", ratio=1, overflow="fold")
    for g, response in enumerate(group.responses):
        numbers = [records.rewards[p, g], *(scores[p, g] for scores in records.parts.values())]
        cut = ">" if response.finish_reason == "length" else " "
        table.add_row(
            str(g),
            *(_cell(number) for number in numbers),
            _cell(records.advantages[p, g], sign="+"),
            f"{len(response.token_ids)}{cut}",
            Text(_shorten(_printable(response.text), max_chars)),
            style="green" if records.advantages[p, g] > 0 else None,
        )
    parts = [Text(_shorten(_printable(group.prompt.text), max_chars), style="bold"), table]
    if any(response.finish_reason == "length" for response in group.responses):
        parts.append(Text("> cut at the length limit", style="dim"))
    return Panel(Group(*parts), title=f"prompt {p} (uid {group.prompt.uid})", title_align="left")


def _cell(value: float, *, sign: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:{sign}.3g}"


def _shorten(text: str, max_chars: int | None) -> str:
    if max_chars is None or len(text) <= max_chars:
        return text
    head, tail = max_chars * 2 // 3, max_chars // 3
    return f"{text[:head]} [... {len(text) - head - tail} characters ...] {text[-tail:]}"


def _printable(text: str) -> str:
    """Control characters as escapes, so that a model's output cannot drive the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _ranges(steps: Sequence[int]) -> str:
    """`1-4, 6` for [1, 2, 3, 4, 6]."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], step]
        else:
            runs.append([step])
    return ", ".join("-".join(map(str, run)) for run in runs)
