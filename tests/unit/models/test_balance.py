"""Micro-batches of several ranks: nothing lost, nothing twice, about the same work."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from covey.models.balance import row_cost, spread
from covey.models.packing import pack, response_lengths
from covey.types import Group, Prompt, Response


def _groups(num_prompts: int, num_samples: int, seed: int = 0) -> list[Group]:
    rng = random.Random(seed)
    return [
        Group(
            Prompt(p, [1] * rng.randint(1, 30), ""),
            [Response([2] * (n := rng.randint(1, 60)), [0.0] * n) for _ in range(num_samples)],
        )
        for p in range(num_prompts)
    ]


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(("num_prompts", "num_samples"), [(8, 4), (1, 4), (1, 1), (5, 2)])
def test_ranks_together_hold_every_response_token_once(world: int, num_prompts: int, num_samples: int) -> None:
    groups = _groups(num_prompts, num_samples)
    total = sum(response_lengths(groups))
    for max_tokens in (40, 200, 10_000):
        batches = [
            pack(groups, max_tokens=max_tokens, device=torch.device("cpu"), rank=r, world=world) for r in range(world)
        ]
        assert len({len(of_rank) for of_rank in batches}) == 1
        index = torch.cat([b.token_index for b in itertools.chain(*batches)])
        assert sorted(index.tolist()) == list(range(total))
        for b in itertools.chain(*batches):
            assert b.num_tokens <= max_tokens or len({id(s) for s in b.segments if s.prompt is None}) == 1


def test_only_the_chosen_groups_are_packed() -> None:
    groups = _groups(6, 2)
    batches = [pack(groups, max_tokens=500, device=torch.device("cpu"), only=[1, 4], rank=r, world=2) for r in range(2)]
    ids = sorted(i for of_rank in batches for b in of_rank for i in b.response_ids)
    assert ids == [2, 3, 8, 9]


def test_a_rank_without_rows_gets_a_prompt_without_targets() -> None:
    groups = [Group(Prompt(0, [1, 2, 3], ""), [Response([4, 5], [0.0, 0.0])])]
    empty = pack(groups, max_tokens=100, device=torch.device("cpu"), rank=1, world=2)[0]
    assert empty.input_ids.tolist() == [1, 2, 3]
    assert empty.response_ids == []
    assert empty.target_rows.numel() == 0


def test_work_is_within_a_tenth_of_the_mean_where_rows_are_many() -> None:
    rng = random.Random(3)
    sizes = [rng.randint(50, 800) for _ in range(200)]
    by_rank = spread([float(s) for s in sizes], sizes, max_tokens=4000, world=8)
    work = [sum(sizes[i] for bin_ in rounds for i in bin_) for rounds in by_rank]
    assert max(work) / (sum(work) / 8) < 1.1
    assert max(work) / (sum(work) / 8) < _contiguous_imbalance(sizes, 8)


def _contiguous_imbalance(sizes: list[int], world: int) -> float:
    work = [sum(sizes[r * len(sizes) // world : (r + 1) * len(sizes) // world]) for r in range(world)]
    return max(work) / (sum(work) / world)


def test_row_cost_counts_pairs_of_tokens() -> None:
    # prompt 3, responses 2 and 1: pairs 3*3/2 + 2*(3+1) + 1*(3+0.5) = 4.5 + 8 + 3.5
    assert row_cost(6, 3, [2, 1], context_cost=0.5) == 6 + 0.5 * 16.0
