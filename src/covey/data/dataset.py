"""Batches of prompts without end: a new order every epoch from the seed, resumable in the middle of one.

Without a curriculum the order of epoch e depends on (seed, e) only. Batches may cross an epoch's end, so no prompt is
left out and a set smaller than a batch works. Every rank holds the same stream and takes its own slice of each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from covey.config.schema import CurriculumConfig
from covey.data.curriculum import Curriculum
from covey.data.prompts import PromptSet
from covey.types import Prompt


class PromptStream:
    """`next_batch` gives `batch_size` prompts; a prompt's uid is its place in the stream, counted from 0."""

    def __init__(
        self,
        prompts: PromptSet,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        curriculum: CurriculumConfig | None = None,
    ) -> None:
        if len(prompts) == 0:
            raise ValueError(f"{prompts.source}: no prompts to train on")
        self.prompts = prompts
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.curriculum = Curriculum(prompts, curriculum, seed=seed, shuffle=shuffle) if curriculum else None
        self._position = 0  # prompts handed out so far, over all ranks
        self._epoch = 0
        self._offset = 0  # prompts handed out of this epoch
        self._order = self._order_of(0)
        self._in_flight: dict[int, int] = {}  # uid -> index of prompts whose pass rate may still be recorded

    def next_batch(self, rank: int = 0, world: int = 1) -> list[Prompt]:
        """The next `batch_size` prompts, or this rank's slice of them; all ranks together see each exactly once."""
        first = self._position
        indices = [self._next_index() for _ in range(self.batch_size)]
        if self.curriculum:
            self._in_flight.update((first + i, index) for i, index in enumerate(indices))
        mine = range(rank * self.batch_size // world, (rank + 1) * self.batch_size // world)
        return [replace(self.prompts[indices[i]], uid=first + i) for i in mine]

    def record(self, uids: Sequence[int], pass_rates: Sequence[float | None]) -> None:
        """Tell the curriculum which share of each prompt's group passed (None: not scored).

        Every rank must record the whole batch, so that all ranks go on with the same order. Nothing happens without a
        curriculum.
        """
        if self.curriculum is None:
            return
        for uid, rate in zip(uids, pass_rates, strict=True):
            index = self._in_flight.pop(uid)
            if rate is not None:
                self.curriculum.record(index, rate)

    @property
    def epoch(self) -> float:
        """Passes over the set so far, for example 1.25."""
        return self._epoch + self._offset / len(self._order)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands; plain numbers, text and lists. Take it when every batch is recorded."""
        state: dict[str, Any] = {
            "position": self._position,
            "epoch": self._epoch,
            "offset": self._offset,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.prompts.fingerprint,
        }
        if self.curriculum:
            state |= {"order": self._order.tolist(), "curriculum": self.curriculum.state_dict()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly there. Raises ValueError when the data, the seed, the shuffling or the curriculum changed."""
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
        if ("curriculum" in state) != (self.curriculum is not None):
            had = "with" if "curriculum" in state else "without"
            raise ValueError(f"data.curriculum: the checkpoint was made {had} one. Set it back to resume")
        if self.curriculum:
            self.curriculum.load_state_dict(state["curriculum"])
        self._position, self._epoch, self._offset = state["position"], state["epoch"], state["offset"]
        self._order = np.array(state["order"]) if "order" in state else self._order_of(self._epoch)
        self._in_flight.clear()

    def _next_index(self) -> int:
        if self._offset == len(self._order):
            self._epoch, self._offset = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        index = int(self._order[self._offset])
        self._position += 1
        self._offset += 1
        return index

    def _order_of(self, epoch: int) -> np.ndarray:
        if self.curriculum:
            return self.curriculum.order(epoch)
        if not self.shuffle:
            return np.arange(len(self.prompts))
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(len(self.prompts))
