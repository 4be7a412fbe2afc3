"""Groups to packed rows: the worked example of PackedBatch, budgets, and that every token is there exactly once."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.models.packing import pack, response_lengths
from covey.types import Group, PackedBatch, Prompt, Response, Segment

CPU = torch.device("cpu")


def _group(prompt: list[int], *responses: list[int]) -> Group:
    return Group(Prompt(0, prompt, ""), [Response(ids, [0.0] * len(ids)) for ids in responses])


def test_the_worked_example() -> None:
    (batch,) = pack([_group([5, 6, 7], [1, 2, 3], [8, 9])], max_tokens=100, device=CPU)
    assert batch.input_ids.tolist() == [5, 6, 7, 1, 2, 8]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3]
    assert batch.segments == [Segment(0, 3, None), Segment(3, 5, 0), Segment(5, 6, 0)]
    assert batch.target_rows.tolist() == [2, 3, 4, 2, 5]
    assert batch.target_ids.tolist() == [1, 2, 3, 8, 9]
    assert batch.token_index.tolist() == [0, 1, 2, 3, 4]
    assert batch.response_index.tolist() == [0, 0, 0, 1, 1]
    assert batch.response_ids == [0, 1]
    assert batch.num_tokens == 6


def test_a_response_of_one_token_adds_no_row() -> None:
    (batch,) = pack([_group([5, 6], [1])], max_tokens=100, device=CPU)
    assert batch.input_ids.tolist() == [5, 6]
    assert batch.target_rows.tolist() == [1]


def test_a_group_over_the_budget_repeats_its_prompt() -> None:
    batches = pack([_group([5, 6, 7], [1, 2, 3], [8, 9, 4])], max_tokens=5, device=CPU)
    assert [b.input_ids.tolist() for b in batches] == [[5, 6, 7, 1, 2], [5, 6, 7, 8, 9]]
    assert [b.token_index.tolist() for b in batches] == [[0, 1, 2], [3, 4, 5]]


def test_a_mini_batch_keeps_the_order_of_the_step() -> None:
    groups = [_group([1], [2, 3]), _group([4], [5, 6, 7]), _group([8], [9])]
    (batch,) = pack(groups, max_tokens=100, device=CPU, only=[1, 2])
    assert batch.token_index.tolist() == [2, 3, 4, 5]
    assert batch.response_ids == [1, 2]


_groups = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 7), min_size=1, max_size=5)), min_size=1, max_size=6
)


def _rows_of(batches: list[PackedBatch], groups: list[Group]) -> dict[int, list[int]]:
    """Every response's target ids as found in the batches, by its number in the step."""
    found: dict[int, list[int]] = {}
    for batch in batches:
        for i, response in enumerate(batch.response_ids):
            assert response not in found
            found[response] = batch.target_ids[batch.response_index == i].tolist()
    return found


@settings(max_examples=60, deadline=None)
@given(shapes=_groups, max_tokens=st.integers(1, 40), world=st.integers(1, 3))
def test_every_response_is_there_once(shapes: list[tuple[int, list[int]]], max_tokens: int, world: int) -> None:
    groups = [
        _group(list(range(100, 100 + p)), *(list(range(10 * i, 10 * i + n)) for i, n in enumerate(lengths)))
        for p, lengths in shapes
    ]
    per_rank = [pack(groups, max_tokens=max_tokens, device=CPU, rank=r, world=world) for r in range(world)]
    if world > 1:
        assert len({len(batches) for batches in per_rank}) == 1
    batches = [batch for of_rank in per_rank for batch in of_rank]
    responses = [response for group in groups for response in group.responses]
    found = _rows_of(batches, groups)
    assert found == {i: r.token_ids for i, r in enumerate(responses) if r.token_ids}
    index = sorted(i for batch in batches for i in batch.token_index.tolist())
    assert index == list(range(sum(response_lengths(groups))))
    for batch in batches:
        assert batch.num_tokens <= max_tokens or len(batch.response_ids) <= 1
        # Each target is predicted by the row before it: its own last token, or the end of its prompt.
        for row, position, target in zip(batch.target_rows, batch.token_index, batch.target_ids, strict=True):
            assert position >= 0
            assert target < 100
            assert row < batch.num_tokens
