"""Megatron's bin/idx format against bytes written by hand."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from covey.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter, document_path, keys_at

ROWS = [[5, 6, 7], [], [-100, 2**31 - 1]]
INDEX = (
    b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", 4) + struct.pack("<QQ", 3, 4)
    + struct.pack("<3i", 3, 0, 2) + struct.pack("<3q", 0, 12, 12) + struct.pack("<4q", 0, 1, 2, 3)
)  # fmt: skip
DATA = struct.pack("<5i", 5, 6, 7, -100, 2**31 - 1)


def test_the_files_are_megatrons_byte_for_byte(tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(str(tmp_path / "a"))
    for row in ROWS:
        writer.append(row)
    assert not (tmp_path / "a.bin").exists()
    assert writer.commit() == [str(tmp_path / "a.bin"), str(tmp_path / "a.idx")]
    assert (tmp_path / "a.bin").read_bytes() == DATA
    assert (tmp_path / "a.idx").read_bytes() == INDEX
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]


def test_rows_are_read_from_bytes_written_by_hand(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(DATA)
    (tmp_path / "a.idx").write_bytes(INDEX)
    dataset = IndexedDataset(str(tmp_path / "a"))
    assert [dataset[i].tolist() for i in range(len(dataset))] == ROWS


def test_other_number_types_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(struct.pack("<4H", 1, 2, 3, 65000))
    (tmp_path / "a.idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3) + struct.pack("<2i2q3q", 1, 3, 0, 2, 0, 1, 2)
    )
    dataset = IndexedDataset(str(tmp_path / "a"))
    assert [dataset[0].tolist(), dataset[1].tolist()] == [[1], [2, 3, 65000]]


def test_no_rows_are_possible(tmp_path: Path) -> None:
    IndexedDatasetWriter(str(tmp_path / "a")).commit()
    assert len(IndexedDataset(str(tmp_path / "a"))) == 0


@pytest.mark.parametrize(
    ("index", "data", "expected"),
    [
        (INDEX[:-30], DATA, r"a\.idx: cut short"),
        (INDEX, DATA[:-1], r"a\.bin: cut short \(19 of 20 bytes\)"),
        (b"x" + INDEX[1:], DATA, r"a\.idx: not an indexed dataset"),
        (b"", DATA, r"a\.idx: not an indexed dataset"),
        (INDEX[:9] + struct.pack("<Q", 2) + INDEX[17:], DATA, "version 2"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, index: bytes, data: bytes, expected: str) -> None:
    (tmp_path / "a.bin").write_bytes(data)
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(ValueError, match=expected):
        IndexedDataset(str(tmp_path / "a"))


def test_a_missing_half_is_refused_and_discard_leaves_nothing(tmp_path: Path) -> None:
    writer = IndexedDatasetWriter(str(tmp_path / "a"))
    writer.append([1])
    writer.discard()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"a\.idx: no such file"):
        IndexedDataset(str(tmp_path / "a"))


def test_keys_of_a_prefix_are_found_by_name(tmp_path: Path) -> None:
    prefix = str(tmp_path / "data")
    for key in ("input_ids", "labels"):
        IndexedDatasetWriter(document_path(prefix, key)).commit()
    IndexedDatasetWriter(document_path(str(tmp_path / "database"), "other")).commit()
    assert keys_at(prefix) == ["input_ids", "labels"]
    assert keys_at(str(tmp_path / "no" / "data")) == []
