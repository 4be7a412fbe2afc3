"""The order of prompts by column and by pass rate, against orders worked by hand; all of it survives a resume."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from covey.config.schema import CurriculumConfig
from covey.data.dataset import PromptStream
from covey.data.prompts import PromptSet

LEVELS = [3, None, 1, 2, 1]


def _stream(levels: list[Any] | None = None, *, size: int = 1, shuffle: bool = True, **keys: Any) -> PromptStream:
    rows = [
        {"n": n, "level": level, "prompt_text": str(n), "input_ids": [n]}
        for n, level in enumerate(LEVELS if levels is None else levels)
    ]
    prompts = PromptSet(pa.Table.from_pylist(rows), source="rows.jsonl", prompt_type="empty")
    return PromptStream(prompts, batch_size=size, seed=4, shuffle=shuffle, curriculum=CurriculumConfig(**keys))


def _run(stream: PromptStream, count: int, rates: dict[int, float]) -> list[int]:
    """Take `count` batches; prompt n passes at rates[n], else at 0.5."""
    got: list[int] = []
    for _ in range(count):
        batch = stream.next_batch()
        stream.record([p.uid for p in batch], [rates.get(p.row["n"], 0.5) for p in batch])
        got += [p.row["n"] for p in batch]
    return got


@pytest.mark.parametrize(
    ("levels", "descending", "expected"),
    [
        (LEVELS, False, [2, 4, 3, 0, 1]),
        (LEVELS, True, [0, 3, 2, 4, 1]),
        (["b", "a", "c", None, "a"], False, [1, 4, 0, 2, 3]),
        ([0.5, 0.25], False, [1, 0]),
    ],
)
def test_a_column_orders_every_epoch_and_rows_without_a_value_come_last(
    levels: list[Any], descending: bool, expected: list[int]
) -> None:
    stream = _stream(levels, shuffle=False, by="level", descending=descending)
    assert _run(stream, 2 * len(levels), {}) == expected * 2


def test_equal_values_are_shuffled_anew_each_epoch() -> None:
    stream = _stream([1] * 8 + [0] * 8, by="level", size=16)
    first, second = _run(stream, 1, {}), _run(stream, 1, {})
    assert [n >= 8 for n in first] == [n >= 8 for n in second] == [True] * 8 + [False] * 8
    assert first != second


def test_the_measured_pass_rate_orders_the_next_epoch() -> None:
    stream = _stream(by="pass_rate", descending=True, size=5)
    _run(stream, 1, {0: 0.1, 1: 0.9, 2: 0.3, 3: 1.0, 4: 0.0})
    assert _run(stream, 1, {}) == [3, 1, 2, 0, 4]


def test_a_column_of_weights_sets_how_often_a_prompt_is_drawn() -> None:
    counts = Counter(_run(_stream([1, 3, 0], by="level", mode="sample", size=3), 2000, {}))
    assert counts[2] == 0
    assert abs(counts[1] / 6000 - 0.75) < 0.02


def test_prompts_that_pass_half_of_the_time_are_drawn_most() -> None:
    stream = _stream([0] * 3, by="pass_rate", mode="sample", size=3)
    rates = {0: 0.5, 1: 1.0, 2: 0.9}
    _run(stream, 20, rates)
    counts = Counter(_run(stream, 2000, rates))
    total = 0.25 + 0.01 + 0.09
    for n, weight in enumerate([0.25, 0.01, 0.09]):
        assert abs(counts[n] / 6000 - weight / total) < 0.02


def test_prompts_always_or_never_solved_leave_after_so_many_times_in_a_row() -> None:
    stream = _stream([0] * 4, drop_after=2, size=4)
    rates = {0: 1.0, 1: 0.0, 2: 0.25}
    _run(stream, 1, rates)
    _run(stream, 1, {0: 1.0, 1: 0.5})  # 1 got one right: its count starts again
    assert stream.curriculum is not None
    assert stream.curriculum.num_left_out == 1
    third = _run(stream, 1, {1: 0.0})
    assert set(third[:3]) == {1, 2, 3}  # an epoch of three, and the first of the next
    assert 2 < stream.epoch < 4


def test_unscored_groups_change_nothing_and_all_come_back_when_none_is_left(caplog: pytest.LogCaptureFixture) -> None:
    stream = _stream([0] * 2, drop_after=1, size=2)
    batch = stream.next_batch()
    stream.record([p.uid for p in batch], [None, None])
    assert stream.curriculum is not None
    assert stream.curriculum.num_left_out == 0
    _run(stream, 1, {0: 1.0, 1: 0.0})
    assert set(_run(stream, 1, {})) == {0, 1}
    assert "all come back" in caplog.text


@pytest.mark.parametrize(
    "keys", [{"by": "level"}, {"by": "pass_rate", "mode": "sample"}, {"drop_after": 1}, {"by": "pass_rate"}]
)
def test_resume_in_the_middle_of_an_epoch_goes_on_exactly(keys: dict[str, Any]) -> None:
    rates = {0: 0.0, 1: 1.0, 2: 0.3}
    whole = _stream(size=3, **keys)
    _run(whole, 4, rates)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = _stream(size=3, **keys)
    resumed.load_state_dict(state)
    assert _run(resumed, 9, rates) == _run(whole, 9, rates)
    assert resumed.state_dict() == whole.state_dict()


def test_resume_with_another_curriculum_is_refused() -> None:
    state = _stream(by="level").state_dict()
    with pytest.raises(ValueError, match="data.curriculum differs from the checkpoint's"):
        _stream(by="level", descending=True).load_state_dict(state)
    plain = PromptStream(_stream(by="level").prompts, batch_size=1, seed=4)
    with pytest.raises(ValueError, match="the checkpoint was made with one"):
        plain.load_state_dict(state)


@pytest.mark.parametrize(
    ("levels", "keys", "expected"),
    [
        (LEVELS, {"by": "Level"}, r"data.curriculum.by: 'Level' is not a column.*mean 'level'"),
        ([[1], [2]], {"by": "level"}, "must hold numbers or text to order by it"),
        (["a", "b"], {"by": "level", "mode": "sample"}, "must hold numbers to sample by it"),
        ([1, -1], {"by": "level", "mode": "sample"}, "must hold weights"),
        ([0, 0], {"by": "level", "mode": "sample"}, "must hold weights"),
        (LEVELS, {}, "neither `by` nor `drop_after`"),
        (LEVELS, {"drop_after": 1, "descending": True}, "descending has an effect only with"),
    ],
)
def test_settings_that_cannot_work_are_refused(levels: list[Any], keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        _stream(levels, **keys)
