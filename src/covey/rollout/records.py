"""A step's rollouts on disk: OUTPUT/rollouts/step-000012.parquet, one row a response, written as a whole or not at all.

Everything that replaying the step needs is read back exactly: ids, log-probabilities, sizes of the kept sets, scores,
advantages (NaN included), policy versions. The prompt's row is kept as JSON; of values that JSON has no word for,
numpy's become numbers and lists, others (dates, bytes) their text. Not here: weights and optimizer (checkpoint.py).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from covey.types import Group, Prompt, Response

_FORMAT = 1
_SCORE = "score/"  # + name of a reward function
_SCHEMA = pa.schema(
    [
        ("prompt", pa.int32()),  # 0 .. P-1
        ("sample", pa.int32()),  # 0 .. G-1
        ("uid", pa.int64()),
        ("prompt_text", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("row", pa.string()),
        ("response_text", pa.string()),
        ("response_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float64())),
        ("num_kept", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
    ]
)


@dataclass
class Records:
    """A step as it was trained on. Arrays are (P, G), G of the largest group; NaN in the tail of a smaller one."""

    step: int
    groups: list[Group]
    rewards: np.ndarray  # total reward; NaN: not scored
    parts: dict[str, np.ndarray]  # reward function -> its scores before the weight; NaN: not scored by it
    advantages: np.ndarray


def records_path(output_dir: str | Path, step: int) -> Path:
    """The file of a step."""
    return Path(output_dir) / "rollouts" / f"step-{step:06d}.parquet"


def recorded_steps(output_dir: str | Path) -> list[int]:
    """The steps that have a file, ascending."""
    names = (re.fullmatch(r"step-(\d+)\.parquet", path.name) for path in (Path(output_dir) / "rollouts").glob("step-*"))
    return sorted(int(name[1]) for name in names if name)


def write_records(
    output_dir: str | Path,
    step: int,
    groups: Sequence[Group],
    rewards: np.ndarray,  # (P, G)
    parts: Mapping[str, np.ndarray],  # each (P, G)
    advantages: np.ndarray,  # (P, G)
) -> Path:
    """Write a step's file, replacing an older one; an OSError leaves no partial file behind."""
    rows: list[dict[str, Any]] = []
    for p, group in enumerate(groups):
        prompt = {
            "prompt": p,
            "uid": group.prompt.uid,
            "prompt_text": group.prompt.text,
            "prompt_ids": group.prompt.input_ids,
            "row": json.dumps(group.prompt.row, ensure_ascii=False, default=_jsonable),
        }
        for g, response in enumerate(group.responses):
            scores = {_SCORE + name: float(values[p, g]) for name, values in parts.items()}
            outcome = {"reward": float(rewards[p, g]), "advantage": float(advantages[p, g])}
            rows.append({**prompt, "sample": g, **_response_columns(response), **outcome, **scores})
    schema = _SCHEMA
    for name in parts:
        schema = schema.append(pa.field(_SCORE + name, pa.float64()))
    table = pa.Table.from_pylist(rows, schema.with_metadata({"covey_format": str(_FORMAT), "covey_step": str(step)}))
    path = records_path(output_dir, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    try:
        pq.write_table(table, temporary, compression="zstd")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_records(path: str | Path) -> Records:
    """What write_records wrote. ValueError for a file that is none of ours or of a newer format."""
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{path}: not a readable parquet file ({error}); records are written by `covey train`"
        ) from error
    metadata = table.schema.metadata or {}
    if metadata.get(b"covey_format") != str(_FORMAT).encode():
        found = metadata.get(b"covey_format", b"none").decode()
        raise ValueError(
            f"{path}: record format {found}, this version of covey reads {_FORMAT}; use the version that wrote it"
        )
    rows = table.to_pylist()
    parts = [name for name in table.column_names if name.startswith(_SCORE)]
    groups: list[Group] = []
    for row in rows:
        if row["prompt"] == len(groups):
            prompt = Prompt(row["uid"], row["prompt_ids"], row["prompt_text"], json.loads(row["row"]))
            groups.append(Group(prompt, []))
        groups[-1].responses.append(
            Response(
                token_ids=row["response_ids"],
                logprobs=row["logprobs"],
                text=row["response_text"],
                finish_reason=row["finish_reason"],
                num_kept=row["num_kept"],
                policy_version=row["policy_version"],
            )
        )

    shape = (len(groups), max((len(group.responses) for group in groups), default=0))

    def column(name: str) -> np.ndarray:
        values = np.full(shape, np.nan)
        for row in rows:
            values[row["prompt"], row["sample"]] = row[name]
        return values

    return Records(
        step=int(metadata[b"covey_step"]),
        groups=groups,
        rewards=column("reward"),
        parts={name.removeprefix(_SCORE): column(name) for name in parts},
        advantages=column("advantage"),
    )


def _response_columns(response: Response) -> dict[str, Any]:
    return {
        "response_text": response.text,
        "response_ids": response.token_ids,
        "logprobs": response.logprobs,
        "num_kept": response.num_kept,
        "finish_reason": response.finish_reason,
        "policy_version": response.policy_version,
    }


def _jsonable(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
