"""Records: what is read is what was written."""

import datetime
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from covey.rollout.records import Trained, read_records, recorded_steps, records_path, write_records
from covey.types import Group, Prompt, Response

NAN = math.nan


def step_of_two_groups() -> dict:
    row = {"problem": "3+4=", "answer": "7", "labels": [1.0], "nested": {"a": None}, "task": "math é 数"}
    first = Prompt(uid=2**40, input_ids=[5, 6, 7], text="3+4=\n", row=row)
    second = Prompt(uid=3, input_ids=[9], text="", row={})
    return {
        "groups": [
            Group(
                first,
                [
                    Response(
                        [1, 2],
                        [-0.1, -1e-9],
                        text='7"\x1b[0m',
                        finish_reason="stop",
                        num_kept=[3, 1],
                        policy_version=12,
                    ),
                    Response([3], [float(np.float32(-2.7182818))], text="8", finish_reason="length", policy_version=12),
                ],
            ),
            Group(second, [Response([4, 4, 4], [-0.5, -math.inf, -1 / 3], finish_reason="stop", policy_version=11)]),
        ],
        "rewards": np.array([[1.0, 0.1 + 0.2], [NAN, NAN]]),
        "parts": {"math": np.array([[1.0, 0.0], [NAN, NAN]]), "a.py:fn": np.array([[NAN, 0.3], [-1.0, NAN]])},
        "advantages": np.array([[1 / 3, -1 / 3], [0.0, NAN]]),
    }


def test_step_is_read_back_exactly(tmp_path: Path):
    step = step_of_two_groups()
    records = read_records(write_records(tmp_path, 12, **step))
    assert records.step == 12
    assert records.groups == step["groups"]
    np.testing.assert_array_equal(records.rewards, step["rewards"])
    np.testing.assert_array_equal(records.advantages, step["advantages"])
    assert list(records.parts) == ["math", "a.py:fn"]
    for name, values in step["parts"].items():
        np.testing.assert_array_equal(records.parts[name], values)


def trained() -> Trained:
    return Trained(
        weights={"math": np.array([1.0, 0.5]), "a.py:fn": np.array([0.0, -2.0])},
        tasks=["math é 数", ""],
        ranges=[(0.0, 1.0), (-2.0, 0.5)],
        old_logprobs=np.array([-0.1, -1e-9, -2.7182818, -0.5, -math.inf, -1 / 3], dtype=np.float32),
        ref_logprobs=None,
        checksum="0123456789abcdef",
        made_on={"device": "cpu", "processes": "1"},
    )


def test_what_the_update_added_is_read_back_exactly(tmp_path: Path):
    wanted = trained()
    found = read_records(write_records(tmp_path, 12, **step_of_two_groups(), trained=wanted)).trained
    assert found is not None and wanted.old_logprobs is not None
    for name, values in wanted.weights.items():
        np.testing.assert_array_equal(found.weights[name], values)
    assert found.old_logprobs is not None and found.old_logprobs.dtype == np.float32
    np.testing.assert_array_equal(found.old_logprobs, wanted.old_logprobs)
    assert found.ref_logprobs is None
    scores = read_records(tmp_path / "rollouts" / "step-000012.parquet").scores()
    np.testing.assert_array_equal(scores.total, step_of_two_groups()["rewards"])
    np.testing.assert_array_equal(scores.weights["a.py:fn"], [0.0, -2.0])
    assert (scores.tasks, scores.ranges) == (wanted.tasks, wanted.ranges)
    for name in ("tasks", "ranges", "checksum", "made_on"):
        assert getattr(found, name) == getattr(wanted, name), name


def test_a_file_of_the_first_format_is_still_read(tmp_path: Path):
    """It lacks what the update added, and nothing else."""
    step = step_of_two_groups()
    path = write_records(tmp_path, 12, **step)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"covey_format": "1", "covey_step": "12"}), path)
    records = read_records(path)
    assert records.groups == step["groups"] and records.trained is None


def test_a_newer_format_is_refused(tmp_path: Path):
    path = write_records(tmp_path, 12, **step_of_two_groups())
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"covey_format": "3", "covey_step": "12"}), path)
    with pytest.raises(ValueError, match="record format 3, this version of covey reads up to 2"):
        read_records(path)


def test_row_values_outside_json_become_text_or_numbers(tmp_path: Path):
    step = step_of_two_groups()
    step["groups"][0].prompt.row.update(
        when=datetime.date(2026, 1, 2), count=np.int64(4), vector=np.array([1.5, 2.5]), missing=NAN
    )
    row = read_records(write_records(tmp_path, 1, **step)).groups[0].prompt.row
    assert (row["when"], row["count"], row["vector"]) == ("2026-01-02", 4, [1.5, 2.5])
    assert math.isnan(row["missing"])


def test_steps_are_listed_and_rewritten(tmp_path: Path):
    step = step_of_two_groups()
    assert recorded_steps(tmp_path) == []
    for number in (10, 2, 1_234_567):
        write_records(tmp_path, number, **step)
    (tmp_path / "rollouts" / "step-000003.tmp").write_text("left over")
    assert recorded_steps(tmp_path) == [2, 10, 1_234_567]
    step["rewards"][0, 0] = 0.25
    assert read_records(write_records(tmp_path, 2, **step)).rewards[0, 0] == 0.25


def test_failed_write_leaves_the_old_file_and_no_partial_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_records(tmp_path, 1, **step_of_two_groups())
    before = path.read_bytes()

    def full_disk(table: pa.Table, where: Path, **_options: object) -> None:
        where.write_bytes(b"PAR1 half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_records(tmp_path, 1, **step_of_two_groups())
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_foreign_files_are_refused(tmp_path: Path):
    path = records_path(tmp_path, 1)
    path.parent.mkdir()
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(ValueError, match="record format none"):
        read_records(path)
    path.write_bytes(b"text")
    with pytest.raises(ValueError, match="not a readable parquet file"):
        read_records(path)
