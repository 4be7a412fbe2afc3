"""A rollout on several ranks: each samples and scores its part of the prompts, and all get the whole.

Who samples a prompt does not change its responses: the random numbers belong to (seed, step, prompt, sample). After the
rollout every rank holds all groups and scores of the step, so that advantages, token weights and packing see the whole
batch; that is a few bytes a token, against the gradient's many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from covey.distributed.collectives import gather_objects
from covey.distributed.mesh import Mesh
from covey.rewards.scores import Scores
from covey.rollout.engine import RolloutEngine, Sampling
from covey.types import Group, Prompt, Response

if TYPE_CHECKING:
    from torch import Tensor


class SharedEngine:
    """RolloutEngine that cuts the prompts over the ranks of a mesh; every method is called on all of them."""

    def __init__(self, engine: RolloutEngine, mesh: Mesh, gathered: Callable[[], AbstractContextManager[None]]) -> None:
        """gathered: inside, `engine` may run without the other data ranks (`Policy.gathered`)."""
        self._engine = engine
        self._mesh = mesh
        self._gathered = gathered
        self._seconds = [0.0]

    def generate(
        self, prompts: list[Prompt], sampling: Sampling, *, on_group: Callable[[int, Group], None] | None = None
    ) -> list[Group]:
        """The groups of all prompts, on every rank.

        on_group(index, group) is called for this rank's part only, where index counts from 0 within the part, and of a
        tensor-parallel group only on its first rank; `gather_scores` puts the parts together.
        """
        mine = prompts[part(len(prompts), self._mesh.data_rank, self._mesh.num_data)]
        with self._gathered():
            start = time.perf_counter()  # weights are here, nobody waits for anybody
            groups = self._engine.generate(mine, sampling, on_group=on_group if self._mesh.tp_rank == 0 else None)
            seconds = time.perf_counter() - start
        responses = [group.responses for group in groups] if self._mesh.tp_rank == 0 else None
        parts = gather_objects((seconds, responses), self._mesh.world_group, what="responses of the rollout")
        self._seconds = [seconds for seconds, _ in parts]
        whole: list[list[Response]] = [r for _, of_rank in parts if of_rank is not None for r in of_rank]
        return [Group(prompt, responses) for prompt, responses in zip(prompts, whole, strict=True)]

    def balance(self) -> dict[str, float]:
        """How far the slowest rank of the last rollout was behind the mean, as a share, and which it was."""
        slowest = max(self._seconds)
        mean = sum(self._seconds) / len(self._seconds)
        rank = float(self._seconds.index(slowest))
        return {"rollout_imbalance": slowest / mean - 1.0 if mean else 0.0, "rollout_slowest_rank": rank}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Hand over the policy's weights; gathering sharded ones needs all ranks."""
        self._engine.load_weights(weights, version=version)


def part(num_prompts: int, rank: int, world: int) -> slice:
    """The prompts of one rank: consecutive, in rank order, their numbers differ by at most one."""
    return slice(rank * num_prompts // world, (rank + 1) * num_prompts // world)


def gather_scores(scores: Scores, mesh: Mesh) -> Scores:
    """The scores of all ranks in the order of the prompts, on every rank."""
    if mesh.world == 1:
        return scores
    mine = scores if mesh.tp_rank == 0 else None
    parts = gather_objects(mine, mesh.world_group, what="scores of the rollout")
    return Scores.concat([of_rank for of_rank in parts if of_rank is not None])
