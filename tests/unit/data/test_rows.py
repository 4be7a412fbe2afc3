"""Every format gives the same rows; broken input names file, line and fix."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pyarrow.parquet as parquet
import pytest

from covey.data.rows import find_files, load_rows, nearest_name, require_column, scan

ROWS: list[dict[str, Any]] = [
    {"problem": "计算圆的面积", "answer": "78.54", "labels": [1.0], "level": 3, "meta": {"a": 1}},
    {"problem": "2+2=\n?", "answer": '"4", or four', "labels": [0.5, 2.0], "level": 5, "meta": {"a": 2}},
    {"problem": "e" * 3000, "answer": "", "labels": [], "level": None, "meta": None},
]


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    name = path.name
    if name.endswith(".jsonl"):
        path.write_bytes(_lines(rows))
    elif name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress(_lines(rows)))
    elif name.endswith(".jsonl.bz2"):
        path.write_bytes(bz2.compress(_lines(rows)))
    elif name.endswith(".jsonl.xz"):
        path.write_bytes(lzma.compress(_lines(rows)))
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    elif name.endswith(".parquet"):
        parquet.write_table(pa.Table.from_pylist(rows), path)
    elif name.endswith(".arrow"):
        table = pa.Table.from_pylist(rows)
        opener = ipc.new_file if "file" in name else ipc.new_stream
        with pa.OSFile(str(path), "wb") as sink, opener(sink, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.parquet", "stream.arrow", "file.arrow"],
)
def test_rows_come_back_with_their_types_from_every_format(tmp_path: Path, name: str) -> None:
    _write(tmp_path / name, ROWS)
    rows = load_rows(str(tmp_path / name))
    assert [rows[i] for i in range(len(rows))] == ROWS


def test_zstd_is_read(tmp_path: Path) -> None:
    with pa.output_stream(str(tmp_path / "a.jsonl.zst"), compression="zstd") as file:
        file.write(_lines(ROWS))
    assert load_rows(str(tmp_path / "a.jsonl.zst"))[1] == ROWS[1]


def test_csv_keeps_every_value_as_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([["problem", "answer"], ["line\nbreak", "007"], ["a,b", "1/2"], ["date", "2020-01-01"]])
    rows = load_rows(str(path))
    assert [rows[i]["answer"] for i in range(3)] == ["007", "1/2", "2020-01-01"]
    assert rows[0]["problem"] == "line\nbreak"


def test_a_long_json_list_is_read_across_chunks(tmp_path: Path) -> None:
    rows = [{"problem": "x" * (i % 977), "n": i} for i in range(5000)]  # 2.4 MB, several chunks
    (tmp_path / "a.json").write_text(json.dumps(rows), encoding="utf-8")
    got = load_rows(str(tmp_path / "a.json"))
    assert got.table.to_pylist() == rows


def test_columns_that_appear_late_or_hold_only_null_at_first_are_joined(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": None}] * 1500 + [{"a": 2.5, "b": "text", "c": {"x": 1}}, {"a": 3, "c": {"y": "z"}}]
    _write(tmp_path / "a.jsonl", rows)
    got = load_rows(str(tmp_path / "a.jsonl"))
    assert got[0] == {"a": 1.0, "b": None, "c": None}
    assert got[1500]["c"] == {"x": 1, "y": None}
    assert scan(str(tmp_path / "a.jsonl"))[0] == got.table.schema
    assert scan(str(tmp_path / "a.jsonl"))[1] == 1502


def test_limit_takes_the_first_rows_over_several_sources(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", [{"n": i} for i in range(3)])
    _write(tmp_path / "b.jsonl", [{"n": i} for i in range(3, 9)])
    both = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert load_rows(both, limit=5).table["n"].to_pylist() == [0, 1, 2, 3, 4]
    assert len(load_rows(both)) == 9


def test_a_directory_gives_the_files_of_its_most_frequent_format(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "data").mkdir()
    for name in ("data/b.jsonl", "data/a.jsonl", "c.parquet"):
        _write(tmp_path / name, [{"from": name}])
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "dataset_info.json").write_text("{}")
    assert load_rows(str(tmp_path)).table["from"].to_pylist() == ["data/a.jsonl", "data/b.jsonl"]
    assert "c.parquet" in caplog.text


def test_bad_json_names_file_and_line(tmp_path: Path) -> None:
    lines = [json.dumps({"n": i}) for i in range(30)]
    lines[16] = '{"n": 16,'
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"a\.jsonl:17: not valid JSON.*correct or remove this line"):
        load_rows(str(path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[\n {"a": 1},\n {"a" 2}\n]', r"a\.json:3: not valid JSON"),
        ('[\n {"a": 1},\n', r"a\.json:\d: not valid JSON.*closing"),
        ('[{"a": 1},\n 5]', r"a\.json:2: a row must be a JSON object, not int"),
        ('{\n "a": 1\n}', r"a\.json:1: not valid JSON.*one whole JSON object"),
        ("", r"a\.json: no rows"),
        ("[]", r"a\.json: no rows"),
    ],
)
def test_bad_json_lists_name_file_and_line(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=expected):
        load_rows(str(tmp_path / "a.json"))


def test_a_column_that_changes_its_type_names_the_line(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", [{"answer": 4}] * 20 + [{"answer": "four"}] + [{"answer": 5}] * 5)
    with pytest.raises(ValueError, match=r"a\.jsonl:21: column 'answer' changes its type here: 'four'.*text"):
        load_rows(str(tmp_path / "a.jsonl"))


def test_types_that_differ_between_files_are_refused(tmp_path: Path) -> None:
    _write(tmp_path / "a.jsonl", [{"answer": 4}])
    _write(tmp_path / "b.jsonl", [{"answer": "four"}])
    with pytest.raises(ValueError, match="answer has incompatible types"):
        load_rows(str(tmp_path))


def test_text_that_is_not_utf8_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "x"}\n{"a": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not UTF-8"):
        load_rows(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz"])
def test_a_file_that_is_not_its_format_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not what the name says" * 10)
    with pytest.raises(ValueError, match=rf"{name}: cannot be read as"):
        load_rows(str(tmp_path / name))


def test_csv_with_a_short_line_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(ValueError, match=r"a\.csv: cannot be read as csv.*#3"):
        load_rows(str(tmp_path / "a.csv"))


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    _write(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"trian\.jsonl: no such file.*Did you mean .*train\.jsonl"):
        load_rows(str(tmp_path / "trian.jsonl"))
    with pytest.raises(ValueError, match="Its directory .*nowhere does not exist"):
        load_rows(str(tmp_path / "nowhere" / "a.jsonl"))


def test_formats_that_are_not_known_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.xlsx").write_text("")
    with pytest.raises(ValueError, match=r"a\.xlsx: unknown file format. Known: .*jsonl"):
        find_files(str(tmp_path / "a.xlsx"))
    with pytest.raises(ValueError, match="no data files"):
        find_files(str(tmp_path))


def test_a_missing_column_names_the_one_that_differs_in_case_or_spelling() -> None:
    with pytest.raises(ValueError, match=r"data.prompt_key: 'problem' is not a column of f.jsonl.*mean 'Problem'"):
        require_column(["answer", "Problem", "problems"], "problem", key="data.prompt_key", source="f.jsonl")
    assert nearest_name("anwser", ["task", "answer"]) == "answer"
    assert nearest_name("zzz", ["task", "answer"]) is None
