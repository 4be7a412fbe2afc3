"""`covey reward try`: score responses without a model, and show how each score came about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from covey.config.convert import load_any
from covey.config.schema import Config
from covey.rewards.base import REWARDS
from covey.rewards.runner import Scorer, Scores
from covey.types import Group, Prompt, Response


def run(
    config_path: str | Path,
    data: str | Path,  # JSON lines: rows as the training data has them
    responses: str | Path | None = None,  # JSON lines: {"response": text} or {"responses": [texts]}, one per row
    *,
    overrides: list[str] | None = None,
    limit: int = 20,  # rows; 0: all
) -> dict[str, Any]:
    """Scores of `responses` to the rows of `data` under the configuration's rewards.

    Without responses every row is tried with its own reference answer, which should score high, and with an empty text.
    Returns `functions` (the start-up table), `rows` (per row: task and responses with total, scores, parts, failures),
    `summary` and `counts`. ValueError for a file that does not fit, with its line.
    """
    config = load_any(Path(config_path), overrides or [], schema=Config, reward_names=tuple(REWARDS)).config
    rows = read_lines(data)[: limit or None]
    texts = _given(responses, len(rows)) if responses is not None else [[_reference(config, row), ""] for row in rows]
    groups = [_group(config, i, row, of_row) for i, (row, of_row) in enumerate(zip(rows, texts, strict=True))]
    scorer = Scorer(config.reward, max_response_length=config.rollout.max_response_length)
    try:
        functions = scorer.ready()
        scorer.check_rows(group.prompt.row for group in groups)
        scores = scorer.score(groups)
    finally:
        scorer.close()
    return {
        "functions": functions,
        "rows": [_describe(scores, i, group) for i, group in enumerate(groups)],
        "summary": scores.summary(),
        "counts": scores.counts,
    }


def report_text(result: dict[str, Any], *, width: int = 100) -> str:
    """The result of run() for reading: one block per row, one line per response and reward."""
    lines = []
    for entry in result["functions"]:
        lines.append("  ".join(f"{key}: {value}" for key, value in entry.items() if value))
    for row in result["rows"]:
        lines.append(f"\nrow {row['row']}" + (f" (task {row['task']})" if row["task"] else ""))
        for response in row["responses"]:
            total = "unscored" if response["total"] is None else f"{response['total']:.3f}"
            lines.append(f"  {total:>8}  {_shorten(response['response'], width)}")
            for name, score in response["scores"].items():
                lines.append(
                    f"            {name} = {'none' if score is None else f'{score:.3f}'}{_parts(response, name)}"
                )
    counts = ", ".join(f"{key} {value}" for key, value in result["counts"].items() if value)
    return "\n".join(lines) + f"\n\nfailures: {counts or 'none'}\n"


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Rows of a JSON lines file; ValueError with the line that is no JSON object."""
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: a {type(row).__name__} instead of an object")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no rows")
    return rows


def _given(path: str | Path, num_rows: int) -> list[list[str]]:
    texts = []
    for number, line in enumerate(read_lines(path), 1):
        given = line.get("responses", [line["response"]] if "response" in line else None)
        if not isinstance(given, list) or not all(isinstance(text, str) for text in given) or not given:
            raise ValueError(f"{path}: entry {number} has neither `response` (text) nor `responses` (list of texts)")
        texts.append(given)
    if len(texts) < num_rows:
        raise ValueError(f"{path}: {len(texts)} entries for {num_rows} rows; one entry per row, in their order")
    return texts[:num_rows]


def _reference(config: Config, row: dict[str, Any]) -> str:
    key = config.data.response_key
    return str(row.get(key, "")) if key is not None else ""


def _group(config: Config, index: int, row: dict[str, Any], texts: list[str]) -> Group:
    """The row as training would hand it to the rewards. Tokens are not known here: a word counts as one."""
    missing = config.data.prompt_key not in row
    if missing:
        raise ValueError(f"row {index} has no column data.prompt_key={config.data.prompt_key!r}; has {sorted(row)}")
    key = config.data.response_key
    fields = {**row, "prompt": row[config.data.prompt_key], "response": row.get(key) if key else None}
    responses = [Response([0] * len(text.split()), [0.0] * len(text.split()), text=text) for text in texts]
    return Group(Prompt(index, [0], str(fields["prompt"]), fields), responses)


def _describe(scores: Scores, row: int, group: Group) -> dict[str, Any]:
    routed = [name for name, weights in scores.weights.items() if weights[row] != 0 or _known(scores.parts[name][row])]
    responses = []
    for column, response in enumerate(group.responses):
        details = {name: values[row, column] for name, values in scores.details.items()}
        responses.append(
            {
                "response": response.text,
                "total": _number(scores.total[row, column]),
                "scores": {name: _number(scores.parts[name][row, column]) for name in routed},
                "parts": {name: float(value) for name, value in details.items() if not np.isnan(value)},
            }
        )
    return {"row": row, "task": scores.tasks[row], "responses": responses}


def _known(values: np.ndarray) -> bool:
    return bool((~np.isnan(values)).any())


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _parts(response: dict[str, Any], function: str) -> str:
    parts = {k: v for k, v in response["parts"].items() if k.rpartition("/")[0] == function}
    return "  (" + ", ".join(f"{k.rpartition('/')[2]} {v:.2f}" for k, v in parts.items()) + ")" if parts else ""


def _shorten(text: str, width: int) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= width else line[: width - 3] + "...")
