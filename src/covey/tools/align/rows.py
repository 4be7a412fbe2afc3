"""Where each token of a fixed set stands, however it was batched: the rows that two captures are compared by.

Canonical rows are those of one packed row of everything: for each group its prompt, then its responses without their
last token. A packed micro-batch, a padded batch and a single sequence all map onto them, so a hidden state of one is
compared with the hidden state of the same token in the other. A prompt that was run several times counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from covey.types import Group, PackedBatch

WITNESS_ROWS = 64  # leading rows that are kept first: a prefix of one sequence, on which attention can be recomputed


@dataclass(frozen=True)
class Place:
    """Rows of a batch (batch and position flattened) and the canonical rows that they are; equally long."""

    source: Tensor  # int64
    canonical: Tensor  # int64


class Layout:
    """The canonical rows of a set of groups."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._prompt_lens = [len(group.prompt.input_ids) for group in groups]
        self.group: list[int] = []  # of every row
        self.sample: list[int] = []  # of every row; -1: the prompt's
        self.position: list[int] = []  # of every row, in its sequence
        self._prompt_start: list[int] = []
        self._start: list[int] = []  # first own row of every response
        self._group_of: list[int] = []  # of every response
        targets: list[int] = []
        for p, group in enumerate(groups):
            num_prompt = self._prompt_lens[p]
            self._prompt_start.append(len(self.group))
            self._append(p, -1, range(num_prompt))
            last = len(self.group) - 1
            for g, response in enumerate(group.responses):
                self._start.append(len(self.group))
                self._group_of.append(p)
                own = max(len(response.token_ids) - 1, 0)
                if response.token_ids:
                    targets += [last, *range(len(self.group), len(self.group) + own)]
                self._append(p, g, range(num_prompt, num_prompt + own))
        self.targets = np.array(targets, dtype=np.int64)  # (N,) the row that predicts each response token

    def __len__(self) -> int:
        return len(self.group)

    @property
    def num_witness(self) -> int:
        """Leading rows that form a prefix of the first group's first sequence."""
        first = next((i for i, (g, s) in enumerate(zip(self.group, self.sample, strict=True)) if g or s > 0), len(self))
        return min(first, WITNESS_ROWS)

    def choose(self, limit: int) -> np.ndarray:
        """At most `limit` rows, ascending: the witness, then rows at even distances of the rest."""
        if limit >= len(self):
            return np.arange(len(self))
        witness = min(self.num_witness, max(1, limit // 2))
        rest = np.linspace(witness, len(self) - 1, limit - witness).round().astype(np.int64)
        return np.unique(np.concatenate([np.arange(witness), rest]))

    def of_packed(self, batch: PackedBatch) -> Place:
        """The rows of a packed micro-batch."""
        source: list[int] = []
        canonical: list[int] = []
        rows, owner = batch.target_rows.tolist(), batch.response_index.tolist()
        of_response: list[list[int]] = [[] for _ in batch.response_ids]
        for row, index in zip(rows, owner, strict=True):
            of_response[index].append(row)
        for response, (last, *own) in zip(batch.response_ids, of_response, strict=True):
            p = self._group_of[response]
            num_prompt = self._prompt_lens[p]
            source += [*range(last - num_prompt + 1, last + 1), *own]
            canonical += self._rows(p, response, len(own))
        return _once(source, canonical)

    def of_sequences(self, responses: Sequence[int], lengths: Sequence[int], width: int) -> Place:
        """The rows of a batch of whole sequences (prompt and response) of `width` positions, aligned at the left."""
        source: list[int] = []
        canonical: list[int] = []
        for i, (response, length) in enumerate(zip(responses, lengths, strict=True)):
            p = self._group_of[response]
            source += range(i * width, i * width + length)
            canonical += self._rows(p, response, length - self._prompt_lens[p])
        return _once(source, canonical)

    def _rows(self, group: int, response: int, own: int) -> list[int]:
        prompt, start = self._prompt_start[group], self._start[response]
        return [*range(prompt, prompt + self._prompt_lens[group]), *range(start, start + own)]

    def _append(self, group: int, sample: int, positions: range) -> None:
        self.group += [group] * len(positions)
        self.sample += [sample] * len(positions)
        self.position += positions


def _once(source: list[int], canonical: list[int]) -> Place:
    """Each canonical row from its first source."""
    rows, first = np.unique(np.array(canonical, dtype=np.int64), return_index=True)
    chosen = np.array(source, dtype=np.int64)[first] if len(source) else rows
    return Place(torch.from_numpy(chosen), torch.from_numpy(rows))
