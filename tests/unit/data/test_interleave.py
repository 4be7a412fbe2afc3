"""Drawing rows of several sources keeps order and shares, and ends with the first source that runs out."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from covey.data.interleave import interleave


def test_rows_of_each_source_stay_in_order_with_the_asked_shares(write_jsonl: Callable[..., str]) -> None:
    a = write_jsonl([{"from": "a", "n": i} for i in range(20000)], "a.jsonl")
    b = write_jsonl([{"from": "b", "n": i} for i in range(3000)], "b.jsonl")
    schema = pa.schema([("from", pa.string()), ("n", pa.int64())])
    rows = [row for table in interleave([a, b], [0.75, 0.25], seed=1, schema=schema) for row in table.to_pylist()]
    for name in "ab":
        drawn = [row["n"] for row in rows if row["from"] == name]
        assert drawn == list(range(len(drawn)))
    assert sum(row["from"] == "b" for row in rows) == 3000  # it ran out
    assert abs(len(rows) - 12000) < 4 * (12000 * 3) ** 0.5  # four standard deviations of the negative binomial
    again = [row for table in interleave([a, b], [0.75, 0.25], seed=1, schema=schema) for row in table.to_pylist()]
    assert again == rows


def test_a_source_that_runs_out_at_once_ends_it(write_jsonl: Callable[..., str]) -> None:
    a, b = write_jsonl([{"n": 1}] * 5, "a.jsonl"), write_jsonl([{"n": 2}] * 5000, "b.jsonl")
    schema = pa.schema([("n", pa.int64())])
    rows = [row for table in interleave([a, b], [0.5, 0.5], seed=3, schema=schema) for row in table.to_pylist()]
    assert sum(row["n"] == 1 for row in rows) == 5
    assert len(rows) < 40
