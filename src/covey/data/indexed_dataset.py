"""Megatron's indexed dataset (`.bin`: tokens, `.idx`: lengths), version 1, read and written: one sequence a row.

Layout of PREFIX_packed_KEY_document.idx, little endian: b"MMIDIDX\\0\\0", version (u64 = 1), dtype code (u8), number of
sequences (u64), number of document bounds (u64), lengths (i32 each), byte offsets into the .bin (i64 each), document
bounds (i64 each). Multimodal modes are left out.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HEADER = b"MMIDIDX\x00\x00"
DTYPES: dict[int, type[Any]] = {
    1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16,
}  # fmt: skip
INT32 = 4


class IndexedDataset:
    """Sequences of token ids by row, mapped from disk. Example: IndexedDataset("data_packed_input_ids_document")[0]"""

    def __init__(self, path_prefix: str) -> None:
        """Raises ValueError when the pair of files is missing, of another version, or cut short."""
        index_path, data_path = Path(path_prefix + ".idx"), Path(path_prefix + ".bin")
        for path in (index_path, data_path):
            if not path.is_file():
                raise ValueError(f"{path}: no such file; an indexed dataset is a pair of .bin and .idx")
        index = np.memmap(index_path, mode="r") if index_path.stat().st_size else np.zeros(0, np.uint8)
        start = len(HEADER) + 8 + 1 + 8 + 8
        if index.size < start or index[: len(HEADER)].tobytes() != HEADER:
            raise ValueError(f"{index_path}: not an indexed dataset (no MMIDIDX header). Preprocess the data again")
        version, code, count, bounds = struct.unpack("<QBQQ", index[len(HEADER) : start].tobytes())
        if version != 1 or code not in DTYPES:
            raise ValueError(f"{index_path}: version {version}, dtype code {code}; only version 1 is known")
        if index.size < start + count * 12 + bounds * 8:
            raise ValueError(
                f"{index_path}: cut short ({index.size} bytes for {count} rows). Preprocess the data again"
            )
        self.lengths = index[start : start + 4 * count].view("<i4")
        self._offsets = index[start + 4 * count : start + 12 * count].view("<i8")
        dtype = np.dtype(DTYPES[code])
        needed = int(self._offsets[-1]) + int(self.lengths[-1]) * dtype.itemsize if count else 0
        if data_path.stat().st_size < needed:
            raise ValueError(f"{data_path}: cut short ({data_path.stat().st_size} of {needed} bytes)")
        self._data = np.memmap(data_path, mode="r", dtype=dtype) if needed else np.zeros(0, dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        first = int(self._offsets[row]) // self._data.itemsize
        return self._data[first : first + int(self.lengths[row])]


class IndexedDatasetWriter:
    """Appends rows of int32 tokens; the files appear under their names in `commit`, whole or not at all."""

    def __init__(self, path_prefix: str) -> None:
        self._prefix = path_prefix
        self._data = open(f"{path_prefix}.bin.tmp", "wb")  # noqa: SIM115  # closed in commit or discard
        self._lengths = array("i")

    def append(self, tokens: Sequence[int]) -> None:
        """One row."""
        self._data.write(np.asarray(tokens, dtype="<i4").tobytes())
        self._lengths.append(len(tokens))

    def commit(self) -> list[str]:
        """Write the index and put both files in place; returns their paths."""
        self._data.close()
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.zeros(0, np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64) * 4])[: len(lengths)]
        bounds = np.arange(len(lengths) + 1, dtype="<i8")
        with open(f"{self._prefix}.idx.tmp", "wb") as file:
            file.write(HEADER + struct.pack("<QBQQ", 1, INT32, len(lengths), len(bounds)))
            file.write(lengths.astype("<i4").tobytes() + offsets.astype("<i8").tobytes() + bounds.tobytes())
        paths = [f"{self._prefix}.bin", f"{self._prefix}.idx"]
        for path in paths:
            os.replace(f"{path}.tmp", path)
        return paths

    def discard(self) -> None:
        """Remove what was written so far."""
        self._data.close()
        for suffix in (".bin.tmp", ".idx.tmp"):
            Path(self._prefix + suffix).unlink(missing_ok=True)


def document_path(prefix: str, key: str) -> str:
    """Path, without suffix, of the pair that holds `key`. Example: data_packed_input_ids_document"""
    return f"{prefix}_packed_{key}_document"


def keys_at(prefix: str) -> list[str]:
    """Keys of an indexed dataset at a prefix; empty when there is none."""
    path = Path(prefix)
    start, end = f"{path.name}_packed_", "_document.idx"
    names = (p.name for p in path.parent.glob("*_document.idx") if p.name.startswith(start))
    return sorted(name[len(start) : -len(end)] for name in names)
