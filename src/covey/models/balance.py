"""Rows of a batch to micro-batches of several ranks: as many on each rank, and about the same work in each.

With sharded weights all ranks run their k-th micro-batch at the same time, so a round lasts as long as its largest one.
Rows are dealt largest first to the bin with the least work (LPT, Graham 1969), and bins of similar work share a round.
"""

from __future__ import annotations

from collections.abc import Sequence


def spread(costs: Sequence[float], sizes: Sequence[int], *, max_tokens: int, world: int) -> list[list[list[int]]]:
    """[rank][round] -> indices of rows; every rank has the same number of rounds, some of them may be empty.

    costs: work of each row, any unit. sizes: its tokens; a bin holds at most `max_tokens`, or one larger row.
    The same arguments give the same result on every rank.
    """
    num_bins = _round_up(max(1, -(-sum(sizes) // max_tokens)), world)
    while (bins := _deal(costs, sizes, max_tokens, num_bins)) is None:
        num_bins += world
    bins.sort(key=lambda rows: (-sum(costs[i] for i in rows), rows))
    by_rank: list[list[list[int]]] = [[] for _ in range(world)]
    for first in range(0, num_bins, world):
        in_round = bins[first : first + world]
        # Every other round runs backwards, so that no rank gets the largest bin of all rounds.
        for rank, rows in enumerate(in_round if first // world % 2 == 0 else reversed(in_round)):
            by_rank[rank].append(sorted(rows))
    return by_rank


def row_cost(num_tokens: int, num_prompt: int, response_lengths: Sequence[int], *, context_cost: float) -> float:
    """Work of a packed row, in tokens through the linear layers.

    context_cost: work of attending to one token of context, in the same unit: about 1 / (6 x hidden size), because a
    layer's matrices cost 24 D^2 and attention 4 D per token of context in forward.
    """
    context = num_prompt**2 / 2 + sum(n * (num_prompt + n / 2) for n in response_lengths)
    return num_tokens + context_cost * context


def _deal(costs: Sequence[float], sizes: Sequence[int], max_tokens: int, num_bins: int) -> list[list[int]] | None:
    """Rows to the bin with the least work that has room; None when one finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    work, room = [0.0] * num_bins, [max_tokens] * num_bins
    for row in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        fits = [b for b in range(num_bins) if sizes[row] <= room[b] or not bins[b]]
        if not fits:
            return None
        best = min(fits, key=lambda b: (work[b], b))
        bins[best].append(row)
        work[best] += costs[row]
        room[best] -= sizes[row]
    return bins


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
