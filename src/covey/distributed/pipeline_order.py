"""Who does what when in a pipeline: one forward, one backward (1F1B), and the same interleaved over chunks of a rank.

The model's layers are cut into chunks; chunk c is on rank c modulo the number of ranks. 1F1B (PipeDream-Flush,
arXiv:2006.09503 sec. 3) runs a backward as soon as there is one, so that a rank keeps the activations of few
micro-batches; several chunks a rank (arXiv:2104.04473 sec. 2.2) shorten the wait at both ends.

The number of micro-batches need not divide by anything. Every rank knows the order of all, hence when the others send.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Literal

Kind = Literal["forward", "backward"]


@dataclass(frozen=True)
class Action:
    """One pass of a micro-batch through a chunk."""

    kind: Kind
    chunk: int
    micro: int

    def feeds(self, num_chunks: int) -> Action | None:
        """The action on another rank that takes what this one makes; None at the ends."""
        chunk = self.chunk + (1 if self.kind == "forward" else -1)
        return replace(self, chunk=chunk) if 0 <= chunk < num_chunks else None

    def takes(self, num_chunks: int) -> Action | None:
        """The action on another rank that makes what this one takes; None at the ends."""
        chunk = self.chunk - (1 if self.kind == "forward" else -1)
        return replace(self, chunk=chunk) if 0 <= chunk < num_chunks else None


def layers_of_chunks(num_layers: int, num_ranks: int, chunks_per_rank: int, given: Sequence[int] | None) -> list[range]:
    """The layers of every chunk; ValueError when there are too few, or the given numbers are not theirs.

    given: layers of each chunk (parallel.pp_layers); None: as even as possible, the first chunks one more.
    """
    num_chunks = num_ranks * chunks_per_rank
    if given is None:
        if num_layers < num_chunks:
            raise ValueError(
                f"parallel.pp={num_ranks} x pp_chunks={chunks_per_rank} = {num_chunks} pieces, but the model has "
                f"{num_layers} layers: lower one of them"
            )
        sizes = [num_layers // num_chunks + (chunk < num_layers % num_chunks) for chunk in range(num_chunks)]
    else:
        sizes = list(given)
        if len(sizes) != num_chunks or sum(sizes) != num_layers:
            raise ValueError(
                f"parallel.pp_layers={sizes} gives {sum(sizes)} layers to {len(sizes)} pieces, but the model has "
                f"{num_layers} layers and pp={num_ranks} x pp_chunks={chunks_per_rank} = {num_chunks} pieces"
            )
    ends = [sum(sizes[:i]) for i in range(num_chunks + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def describe_stages(chunks: Sequence[range], num_ranks: int) -> dict[str, str]:
    """What every pipeline rank holds, for the start-up table; empty without a pipeline."""
    if num_ranks == 1:
        return {}
    found = {}
    for rank in range(num_ranks):
        ends = [(chunk[0], chunk[-1]) for chunk in chunks[rank::num_ranks]]
        layers = [f"layer {first}" if first == last else f"layers {first}-{last}" for first, last in ends]
        before, after = ["embedding"] * (rank == 0), ["norm and head"] * (rank == num_ranks - 1)
        found[f"stage {rank}"] = ", ".join([*before, *layers, *after])
    return found


def orders(num_micros: int, num_ranks: int, chunks_per_rank: int) -> list[list[Action]]:
    """[rank] -> its forwards and backwards in order. Ranks that keep to it never wait for each other in a circle.

    Micro-batches go round by round through the chunks of a rank: at least `num_ranks` of them through the first, then
    through the second, and so on. With passes of equal length a rank stands still for 2 (num_ranks - 1) passes in all.
    """
    num_rounds = max(1, num_micros // num_ranks)
    round_of = [micro * num_rounds // num_micros for micro in range(num_micros)]
    largest_round = max(map(round_of.count, round_of))
    found = []
    for rank in range(num_ranks):
        forwards = _forwards(round_of, _chunks(rank, num_ranks, chunks_per_rank))
        last_first = _forwards(round_of, _chunks(rank, num_ranks, chunks_per_rank)[::-1])
        backwards = [replace(action, kind="backward") for action in last_first]
        later_ranks = num_ranks - rank - 1
        ahead = later_ranks if chunks_per_rank == 1 else 2 * later_ranks + (chunks_per_rank - 1) * largest_round
        ahead = min(ahead, len(forwards))
        pairs = zip(forwards[ahead:], backwards, strict=False)
        found.append([*forwards[:ahead], *chain.from_iterable(pairs), *backwards[len(forwards) - ahead :]])
    return found


def forward_orders(num_micros: int, num_ranks: int, chunks_per_rank: int) -> list[list[Action]]:
    """[rank] -> its forwards in order, where nothing is trained."""
    round_of = [micro // num_ranks for micro in range(num_micros)]
    return [_forwards(round_of, _chunks(rank, num_ranks, chunks_per_rank)) for rank in range(num_ranks)]


def _chunks(rank: int, num_ranks: int, chunks_per_rank: int) -> range:
    return range(rank, num_ranks * chunks_per_rank, num_ranks)


def _forwards(round_of: Sequence[int], chunks: Sequence[int]) -> list[Action]:
    """Forwards by round, within it in the order of `chunks`, within a chunk by micro-batch."""
    key = [(round_of[micro], place, micro) for place in range(len(chunks)) for micro in range(len(round_of))]
    return [Action("forward", chunks[place], micro) for _, place, micro in sorted(key)]
