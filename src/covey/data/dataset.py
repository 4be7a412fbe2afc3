"""Batches of prompts without end: a new order every epoch from the seed, resumable in the middle of one.

The order of epoch e depends on (seed, e) only. Batches may cross an epoch's end, so no prompt is left out and a set
smaller than a batch works. Every rank holds the same stream and takes its own slice of each batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from covey.data.prompts import PromptSet
from covey.types import Prompt


class PromptStream:
    """`next_batch` gives `batch_size` prompts; a prompt's uid is its place in the stream, counted from 0."""

    def __init__(self, prompts: PromptSet, *, batch_size: int, seed: int, shuffle: bool = True) -> None:
        if len(prompts) == 0:
            raise ValueError(f"{prompts.source}: no prompts to train on")
        self.prompts = prompts
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._position = 0  # prompts handed out so far, over all ranks
        self._order = self._order_of(0)

    def next_batch(self, rank: int = 0, world: int = 1) -> list[Prompt]:
        """The next `batch_size` prompts, or this rank's slice of them; all ranks together see each exactly once."""
        indices = [self._next_index() for _ in range(self.batch_size)]
        first = self._position - self.batch_size
        mine = range(rank * self.batch_size // world, (rank + 1) * self.batch_size // world)
        return [replace(self.prompts[indices[i]], uid=first + i) for i in mine]

    @property
    def epoch(self) -> float:
        """Passes over the set so far, for example 1.25."""
        return self._position / len(self.prompts)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands; plain numbers and text."""
        return {
            "position": self._position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.prompts.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly there. Raises ValueError when the data, the seed or the shuffling is not the same."""
        if state["fingerprint"] != self.prompts.fingerprint:
            raise ValueError(
                f"{self.prompts.source}: the prompts differ from those of the checkpoint (rows, order, template, "
                "tokenizer or length limit changed). Resume with the same data, or start a new output_dir"
            )
        for key, now in (("seed", self.seed), ("shuffle", self.shuffle)):
            if state[key] != now:
                raise ValueError(
                    f"{key}={now}, but the checkpoint was made with {key}={state[key]}. Set it back to resume"
                )
        self._position = int(state["position"])
        self._order = self._order_of(self._position // len(self.prompts))

    def _next_index(self) -> int:
        epoch, offset = divmod(self._position, len(self.prompts))
        if offset == 0:
            self._order = self._order_of(epoch)
        self._position += 1
        return int(self._order[offset])

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(len(self.prompts))
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(len(self.prompts))
