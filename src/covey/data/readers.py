"""One data file -> Arrow tables of about a thousand rows, with errors that name file, line and fix."""

from __future__ import annotations

import bisect
import io
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow import csv, ipc, parquet

BATCH_ROWS = 1000
CHUNK_BYTES = 1 << 20
COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".lz4"}


def format_of(path: Path) -> str | None:
    """Name of the format by the file's suffixes, for example "jsonl" of `a.jsonl.gz`; None when unknown."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = bool(suffixes) and suffixes[-1] in COMPRESSED
    name = "".join(suffixes[-2:-1] if compressed else suffixes[-1:]).lstrip(".")
    if name not in FORMATS or (compressed and name in ("parquet", "arrow")):
        return None
    return name


def read_file(path: Path) -> Iterator[pa.Table]:
    """Tables of one file, in order. Raises ValueError with file, line and fix."""
    name = format_of(path)
    if name is None:
        raise ValueError(f"{path}: unknown file format. Known: {', '.join(FORMATS)}")
    try:
        yield from FORMATS[name](path)
    except (pa.ArrowInvalid, EOFError, UnicodeError, lzma.LZMAError, OSError) as error:
        raise ValueError(
            f"{path}: cannot be read as {name}: {error}. Write the file again, or correct its suffix"
        ) from error


def _read_jsonl(path: Path) -> Iterator[pa.Table]:
    def parsed() -> Iterator[tuple[int, Any]]:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _parse_line(line, path, number)

    yield from _tables(parsed(), path)


def _read_json(path: Path) -> Iterator[pa.Table]:
    """A list of objects, or one object a line."""
    with _open(path) as file:
        start = file.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"["):
        yield from _tables(_items_of_list(path), path)
    else:
        yield from _read_jsonl(path)


def _items_of_list(path: Path) -> Iterator[tuple[int, Any]]:
    """Items of a top-level JSON list with their lines, read in chunks so that a long list needs little memory."""
    decoder = json.JSONDecoder()
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig") as file:
        text, at, line, ended = "", 0, 1, False
        started = False
        while True:
            end = at
            while end < len(text) and (text[end].isspace() or text[end] == "," or (text[end] == "[" and not started)):
                started = started or text[end] == "["
                end += 1
            line += text.count("\n", at, end)
            at = end
            if at < len(text) and text[at] == "]":
                return
            try:
                item, end = decoder.raw_decode(text, at)
                if end == len(text) and not ended:  # a number may go on in the next chunk
                    raise json.JSONDecodeError("incomplete", text, end)
            except json.JSONDecodeError as error:
                if ended:
                    where = line + error.lineno - 1 - text.count("\n", 0, at)
                    fix = "Correct the file there" if at < len(text) else "The list has no end: add the closing ']'"
                    raise ValueError(f"{path}:{where}: not valid JSON: {error.msg}. {fix}") from error
                chunk = file.read(max(CHUNK_BYTES, len(text) - at))
                text, at, ended = text[at:] + chunk, 0, not chunk
                continue
            yield line, item
            line += text.count("\n", at, end)
            at = end


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[pa.Table]:
    read = csv.ReadOptions(use_threads=False)  # one thread: errors tell the row
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    with _open(path) as file:
        if not file.read(1):
            return
    with _open(path) as file:
        names = csv.open_csv(file, read_options=read, parse_options=parse).schema.names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}:1: columns named twice: {', '.join(twice)}. Give every column its own name")
    convert = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    with _open(path) as file:
        for batch in csv.open_csv(file, read_options=read, parse_options=parse, convert_options=convert):
            yield pa.Table.from_batches([batch])


def _read_tsv(path: Path) -> Iterator[pa.Table]:
    yield from _read_csv(path, "\t")


def _read_parquet(path: Path) -> Iterator[pa.Table]:
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=BATCH_ROWS):
            yield pa.Table.from_batches([batch])


def _read_arrow(path: Path) -> Iterator[pa.Table]:
    """The stream format (`datasets`) or the file format (feather)."""
    with pa.memory_map(str(path)) as file:
        try:
            reader = ipc.open_file(file)
            batches: Iterator[pa.RecordBatch] = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            file.seek(0)
            batches = iter(ipc.open_stream(file))
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield pa.Table.from_batches([batch.slice(start, BATCH_ROWS)])


FORMATS: dict[str, Callable[[Path], Iterator[pa.Table]]] = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "csv": _read_csv,
    "tsv": _read_tsv,
    "parquet": _read_parquet,
    "arrow": _read_arrow,
}


def _open(path: Path) -> BinaryIO:
    if path.suffix.lower() == ".xz":
        return lzma.open(path)  # type: ignore[return-value]
    if path.suffix.lower() in COMPRESSED:
        return io.BufferedReader(pa.input_stream(str(path)))  # type: ignore[arg-type]
    return open(path, "rb")


def _parse_line(line: bytes, path: Path, number: int) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start}). Save the file as UTF-8"
        ) from error
    except json.JSONDecodeError as error:
        shown = line[:80].decode("utf-8", "replace").strip()
        raise ValueError(
            f"{path}:{number}: not valid JSON: {error.msg} at column {error.colno}: {shown!r}. "
            "Every line must be one whole JSON object: correct or remove this line"
        ) from error


def _tables(items: Iterator[tuple[int, Any]], path: Path) -> Iterator[pa.Table]:
    lines: list[int] = []
    rows: list[dict[str, Any]] = []
    for line, item in items:
        if not isinstance(item, dict):
            kind = type(item).__name__
            raise ValueError(f"{path}:{line}: a row must be a JSON object, not {kind}: {str(item)[:80]!r}")
        lines.append(line)
        rows.append(item)
        if len(rows) == BATCH_ROWS:
            yield _table(rows, lines, path)
            lines, rows = [], []
    if rows:
        yield _table(rows, lines, path)


def _table(rows: list[dict[str, Any]], lines: list[int], path: Path) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: _array([row.get(name) for row in rows], name, lines, path) for name in names})


def _array(values: list[Any], name: str, lines: list[int], path: Path) -> pa.Array:
    """One column; when its values do not share a type, an error at the first that differs from those before it."""
    errors = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError)
    try:
        return pa.array(values)
    except errors as error:
        reason = error

    def fails(count: int) -> bool:
        try:
            pa.array(values[:count])
        except errors:
            return True
        return False

    first = bisect.bisect_left(range(1, len(values) + 1), True, key=fails)
    raise ValueError(
        f"{path}:{lines[first]}: column '{name}' changes its type here: {values[first]!r:.80} ({reason}). "
        "Give the column one type in all rows, for example text"
    ) from reason
