"""A capture on disk: DIR/bundle.json (facts, fingerprints, what each tensor is) and DIR/tensors.safetensors.

Both are portable between devices and versions of torch. A bundle is written as a whole or not at all. Ids, rewards and
log-probabilities of the fixed set are in it, so that another device can run exactly the same (`--from`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from covey.rewards.scores import Scores
from covey.types import Group, Prompt, Response

_FORMAT = 1
_JSON, _TENSORS = "bundle.json", "tensors.safetensors"


@dataclass(frozen=True)
class Step:
    """Where a rung's tensors are: `values/KEY` (chosen rows) and `norms/KEY` (all rows), `rows` says which."""

    rung: str
    name: str
    key: str


@dataclass
class Bundle:
    """A capture. `meta` is bundle.json, `tensors` the other file."""

    meta: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def facts(self) -> dict[str, Any]:
        """What was run: ids, sizes, eps, rope, back ends, versions."""
        return self.meta["facts"]

    @property
    def steps(self) -> list[Step]:
        """The captured steps of the model in the order of running."""
        return [Step(**step) for step in self.meta["steps"]]

    def values(self, rung: str, name: str) -> Tensor | None:
        """(rows, width) of a step, in its own numbers; None when it was not captured."""
        for step in self.steps:
            if (step.rung, step.name) == (rung, name):
                return self.tensors[f"values/{step.key}"]
        return None

    def groups(self) -> list[Group]:
        """The fixed set; texts and data rows are not kept."""
        prompts = _split(self.tensors["prompt_ids"], self.tensors["prompt_lens"])
        ids = _split(self.tensors["response_ids"], self.tensors["response_lens"])
        logprobs = _split(self.tensors["rollout_logprobs"], self.tensors["response_lens"])
        kept = self.tensors.get("num_kept")
        num_kept = [None] * len(ids) if kept is None else _split(kept, self.tensors["response_lens"])
        responses = [
            Response(ids[i], logprobs[i], finish_reason=reason, num_kept=num_kept[i])
            for i, reason in enumerate(self.meta["finish_reasons"])
        ]
        groups, start = [], 0
        for p, size in enumerate(self.meta["group_sizes"]):
            prompt = Prompt(self.meta["uids"][p], prompts[p], "")
            groups.append(Group(prompt, responses[start : start + size]))
            start += size
        return groups

    def scores(self) -> Scores:
        """The scores of the fixed set, as the scorer gave them."""
        parts = {name: self.tensors[f"part/{name}"].numpy() for name in self.meta["parts"]}
        weights = {name: np.array(of_rows) for name, of_rows in self.meta["weights"].items()}
        counts = {"errors": 0, "timeouts": 0, "none": 0}
        ranges = [(low, high) for low, high in self.meta["ranges"]]
        total = self.tensors["rewards"].numpy()
        return Scores(total, parts=parts, weights=weights, counts=counts, tasks=self.meta["tasks"], ranges=ranges)


def set_part(groups: Sequence[Group], scores: Scores) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What of a bundle holds the fixed set: (for bundle.json, tensors)."""
    responses = [response for group in groups for response in group.responses]
    kept = [response.num_kept for response in responses]
    meta = {
        "uids": [group.prompt.uid for group in groups],
        "group_sizes": [len(group.responses) for group in groups],
        "finish_reasons": [response.finish_reason for response in responses],
        "tasks": list(scores.tasks),
        "ranges": [list(bounds) for bounds in scores.ranges],
        "weights": {name: of_rows.tolist() for name, of_rows in scores.weights.items()},
        "parts": list(scores.parts),
    }
    prompts = [group.prompt.input_ids for group in groups]
    tensors = {
        "prompt_ids": _ints(prompts),
        "prompt_lens": torch.tensor([len(ids) for ids in prompts]),
        "response_ids": _ints([response.token_ids for response in responses]),
        "response_lens": torch.tensor([len(response.token_ids) for response in responses]),
        "rollout_logprobs": torch.tensor([lp for r in responses for lp in r.logprobs], dtype=torch.float64),
        "rewards": torch.from_numpy(scores.total.copy()),
        **{f"part/{name}": torch.from_numpy(cells.copy()) for name, cells in scores.parts.items()},
    }
    if kept and all(kept):
        tensors["num_kept"] = _ints([one or [] for one in kept])
    return meta, tensors


def write_bundle(directory: Path, bundle: Bundle, *, budget_bytes: int) -> int:
    """Write `directory`, in place of an older bundle; returns its size. ValueError when that holds other files."""
    if directory.exists() and not (directory / _JSON).exists() and any(directory.iterdir()):
        raise ValueError(f"--out {directory}: holds other files than a bundle; name another directory")
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        text = json.dumps({"format": _FORMAT, **bundle.meta}, indent=1, allow_nan=False, default=str)
        (temporary / _JSON).write_text(text, encoding="utf-8")
        save_file({name: tensor.contiguous() for name, tensor in bundle.tensors.items()}, temporary / _TENSORS)
        size = sum(path.stat().st_size for path in temporary.iterdir())
        if size > budget_bytes:
            raise ValueError(
                f"the bundle has {size} bytes, over --budget {budget_bytes}: raise it, or take fewer prompts"
            )
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(temporary, directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return size


def read_bundle(directory: Path) -> Bundle:
    """What write_bundle wrote. ValueError when it is none, of another format, or damaged."""
    if not (directory / _JSON).exists():
        raise ValueError(f"{directory}: no {_JSON}, so not a bundle; make one with `covey align capture CONFIG --out`")
    try:
        meta = json.loads((directory / _JSON).read_text(encoding="utf-8"))
        if meta.get("format") != _FORMAT:
            raise ValueError(f"{directory}: bundle format {meta.get('format')}, this version of covey reads {_FORMAT}")
        return Bundle(meta, load_file(directory / _TENSORS))
    except (json.JSONDecodeError, SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"{directory}: a damaged bundle ({error}); copy or capture it again") from error


def _ints(lists: Sequence[list[int]]) -> Tensor:
    return torch.tensor([value for values in lists for value in values], dtype=torch.int64)


def _split(values: Tensor, lengths: Tensor) -> list[list[Any]]:
    return [part.tolist() for part in values.split(lengths.tolist())]
