"""A step's rollouts on disk: OUTPUT/rollouts/step-000012.parquet, one row a response, written as a whole or not at all.

Everything that replaying the step needs (tools/replay.py) is read back exactly: ids, log-probabilities, sizes of the
kept sets, scores and how they were weighed, advantages (NaN included), policy versions, a checksum of the weights
after the update. The prompt's row is kept as JSON; of values that JSON has no word for, numpy's become numbers and
lists, others (dates, bytes) their text. Not here: weights and optimizer (checkpoint.py).

Format 2 added `Trained`; files of format 1 are read without it.
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

from covey.rewards.scores import Scores
from covey.types import Group, Prompt, Response

_FORMAT = 2
_READABLE = (b"1", b"2")
_SCORE = "score/"  # + name of a reward function
_WEIGHT = "weight/"  # the same
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
_TRAINED = pa.schema(
    [
        ("task", pa.string()),
        ("range_low", pa.float64()),
        ("range_high", pa.float64()),
        ("old_logprobs", pa.list_(pa.float32())),
        ("ref_logprobs", pa.list_(pa.float32())),
    ]
)


@dataclass(frozen=True)
class Trained:
    """How a step's scores became an update, besides what `Records` holds: what a replay starts from or compares with.

    Example of made_on: {"device": "cpu (Xeon)", "dtype": "float32", "torch": "2.8.0", "threads": "8", "processes": "1"}
    """

    weights: dict[str, np.ndarray]  # reward function -> (P,) its weight; 0: not for this row
    tasks: list[str]  # (P,) task of each row; "" without one
    ranges: list[tuple[float, float]]  # (P,) lowest and highest possible reward
    old_logprobs: np.ndarray | None  # (N,) fp32; None: not needed, equal to the current ones
    ref_logprobs: np.ndarray | None  # (N,) fp32; None: no reference
    checksum: str  # of the weights after the update (`Optimizer.checksum`)
    made_on: dict[str, str]  # device, numbers, versions and processes: what equal bits depend on


@dataclass
class Records:
    """A step as it was trained on. Arrays are (P, G), G of the largest group; NaN in the tail of a smaller one."""

    step: int
    groups: list[Group]
    rewards: np.ndarray  # total reward; NaN: not scored
    parts: dict[str, np.ndarray]  # reward function -> its scores before the weight; NaN: not scored by it
    advantages: np.ndarray
    trained: Trained | None = None  # None: an evaluation, or a file of format 1

    def scores(self) -> Scores:
        """What the scorer gave, for an update from the records; failures are not counted again."""
        assert self.trained is not None
        return Scores(
            self.rewards,
            parts=self.parts,
            weights=self.trained.weights,
            counts={"errors": 0, "timeouts": 0, "none": 0},
            tasks=self.trained.tasks,
            ranges=self.trained.ranges,
        )


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
    *,
    trained: Trained | None = None,
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
    metadata = {"covey_format": str(_FORMAT), "covey_step": str(step)}
    if trained is not None:
        schema = _add_trained(rows, schema, trained)
        metadata |= {"covey_checksum": trained.checksum, "covey_made_on": json.dumps(trained.made_on)}
    table = pa.Table.from_pylist(rows, schema.with_metadata(metadata))
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
    if metadata.get(b"covey_format") not in _READABLE:
        found = metadata.get(b"covey_format", b"none").decode()
        raise ValueError(
            f"{path}: record format {found}, this version of covey reads up to {_FORMAT}; use the version that wrote it"
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
        trained=_read_trained(rows, metadata) if b"covey_checksum" in metadata else None,
    )


def _add_trained(rows: list[dict[str, Any]], schema: pa.Schema, trained: Trained) -> pa.Schema:
    """Put the columns of `trained` into `rows`, one a response in canonical order; returns the longer schema."""
    start = 0
    for row in rows:
        p, end = row["prompt"], start + len(row["response_ids"])
        row["task"], (row["range_low"], row["range_high"]) = trained.tasks[p], trained.ranges[p]
        row |= {_WEIGHT + name: float(weights[p]) for name, weights in trained.weights.items()}
        for name in ("old_logprobs", "ref_logprobs"):
            values: np.ndarray | None = getattr(trained, name)
            row[name] = None if values is None else values[start:end]
        start = end
    for field in (*_TRAINED, *(pa.field(_WEIGHT + name, pa.float64()) for name in trained.weights)):
        schema = schema.append(field)
    return schema


def _read_trained(rows: list[dict[str, Any]], metadata: Mapping[bytes, bytes]) -> Trained:
    firsts = [row for row in rows if row["sample"] == 0]
    weights = [name for name in (rows[0] if rows else {}) if name.startswith(_WEIGHT)]

    def tokens(name: str) -> np.ndarray | None:
        if not rows or rows[0][name] is None:
            return None
        return np.array([value for row in rows for value in row[name]], dtype=np.float32)

    return Trained(
        weights={name.removeprefix(_WEIGHT): np.array([row[name] for row in firsts]) for name in weights},
        tasks=[row["task"] for row in firsts],
        ranges=[(row["range_low"], row["range_high"]) for row in firsts],
        old_logprobs=tokens("old_logprobs"),
        ref_logprobs=tokens("ref_logprobs"),
        checksum=metadata[b"covey_checksum"].decode(),
        made_on=json.loads(metadata[b"covey_made_on"]),
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
