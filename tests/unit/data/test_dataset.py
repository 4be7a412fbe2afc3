"""The stream: every prompt once an epoch, the same order for a seed, exact resume, disjoint ranks."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey.data.dataset import PromptStream
from covey.data.prompts import PromptSet


def _prompts(count: int, first: int = 0) -> PromptSet:
    rows = [{"n": i, "prompt_text": str(i), "input_ids": [i, i + 1]} for i in range(first, first + count)]
    return PromptSet(pa.Table.from_pylist(rows), source="rows.jsonl", prompt_type="empty")


def _take(stream: PromptStream, batches: int) -> list[int]:
    return [prompt.row["n"] for _ in range(batches) for prompt in stream.next_batch()]


def test_every_prompt_comes_once_an_epoch_though_batches_cross_its_end() -> None:
    got = _take(PromptStream(_prompts(10), batch_size=4, seed=1), 5)
    assert sorted(got[:10]) == sorted(got[10:]) == list(range(10))
    assert got[:10] != got[10:] != list(range(10))


def test_order_depends_on_the_seed_only() -> None:
    same = [_take(PromptStream(_prompts(20), batch_size=size, seed=7), 20 // size) for size in (1, 4, 10)]
    assert same[0] == same[1] == same[2]
    assert same[0] != _take(PromptStream(_prompts(20), batch_size=20, seed=8), 1)


def test_without_shuffling_rows_come_in_the_order_of_the_file() -> None:
    assert _take(PromptStream(_prompts(3), batch_size=4, seed=1, shuffle=False), 2) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_set_smaller_than_a_batch_works_and_uids_stay_unique() -> None:
    stream = PromptStream(_prompts(2), batch_size=5, seed=0)
    uids = [prompt.uid for _ in range(3) for prompt in stream.next_batch()]
    assert uids == list(range(15))
    assert stream.epoch == 7.5


@given(count=st.integers(1, 9), size=st.integers(1, 7), stop=st.integers(0, 6))
def test_resume_in_the_middle_of_an_epoch_goes_on_exactly(count: int, size: int, stop: int) -> None:
    whole = PromptStream(_prompts(count), batch_size=size, seed=3)
    _take(whole, stop)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = PromptStream(_prompts(count), batch_size=size, seed=3)
    resumed.load_state_dict(state)
    expected = [whole.next_batch() for _ in range(4)]
    assert [resumed.next_batch() for _ in range(4)] == expected
    assert resumed.epoch == whole.epoch


@given(count=st.integers(1, 9), size=st.integers(1, 8), world=st.integers(1, 5))
def test_ranks_share_a_batch_without_repeats(count: int, size: int, world: int) -> None:
    one = PromptStream(_prompts(count), batch_size=size, seed=5)
    ranks = [PromptStream(_prompts(count), batch_size=size, seed=5) for _ in range(world)]
    for _ in range(4):
        parts = [stream.next_batch(rank, world) for rank, stream in enumerate(ranks)]
        assert [prompt for part in parts for prompt in part] == one.next_batch()


def test_resume_with_other_data_seed_or_order_is_refused() -> None:
    state = PromptStream(_prompts(5), batch_size=2, seed=1).state_dict()
    with pytest.raises(ValueError, match="prompts differ from those of the checkpoint"):
        PromptStream(_prompts(5, first=1), batch_size=2, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="seed=2, but the checkpoint was made with seed=1"):
        PromptStream(_prompts(5), batch_size=2, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="shuffle=False"):
        PromptStream(_prompts(5), batch_size=2, seed=1, shuffle=False).load_state_dict(state)


def test_an_empty_set_is_refused() -> None:
    empty: Any = _prompts(3).select(pa.array([], type=pa.int64()).to_numpy())
    with pytest.raises(ValueError, match="no prompts to train on"):
        PromptStream(empty, batch_size=1, seed=0)
