"""Rows from files, directories and the Hugging Face hub, as Arrow tables with every column and type kept.

Reads json (a list, or one object a line), jsonl, csv/tsv, parquet and arrow; json and csv also compressed (gz, bz2,
xz, zst, lz4). Files stream in batches, so memory does not grow with the number of rows unless `load_rows` keeps them.
A CSV has no types: its columns stay text. Objects whose keys differ between rows get null for the missing ones.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from covey.data.readers import BATCH_ROWS, FORMATS, format_of, read_file

logger = logging.getLogger(__name__)

NOT_DATA = {"dataset_info.json", "dataset_infos.json", "state.json"}  # what `datasets` writes beside its arrow files


@dataclass(frozen=True)
class Rows:
    """Rows in memory. Example: Rows(table, source="train.jsonl")[0] == {"problem": "2+2=", "answer": "4"}"""

    table: pa.Table
    source: str  # for messages

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.table.slice(index, 1).to_pylist()[0]

    @property
    def columns(self) -> list[str]:
        """Names of the columns, in the order of the file."""
        return self.table.column_names


def load_rows(source: str | list[str], *, limit: int | None = None) -> Rows:
    """All rows (or the first `limit`) of a file, a directory, a hub id, or several of them one after another.

    Raises ValueError with file, line and fix: missing or empty file, broken line, column of mixed types.
    """
    tables: list[pa.Table] = []
    left = limit
    for table in read_tables(source):
        if left is not None:
            table = table.slice(0, left)
            left -= table.num_rows
        tables.append(table)
        if left == 0:
            break
    name = source if isinstance(source, str) else ", ".join(source)
    if sum(table.num_rows for table in tables) == 0:
        raise ValueError(f"{name}: no rows. Give a file with at least one row")
    return Rows(_concat(tables, name), name)


def scan(source: str | list[str]) -> tuple[pa.Schema, int]:
    """Schema that fits every row, and the number of rows, in one pass without keeping rows. Raises as load_rows."""
    schema = pa.schema([])
    num_rows = 0
    for table in read_tables(source):
        schema = _concat([schema.empty_table(), table.slice(0, 0)], str(source)).schema
        num_rows += table.num_rows
    if num_rows == 0:
        raise ValueError(f"{source}: no rows. Give a file with at least one row")
    return schema, num_rows


def read_tables(source: str | list[str]) -> Iterator[pa.Table]:
    """The rows of one or several sources in tables of about a thousand rows, in the order of the files."""
    for one in [source] if isinstance(source, str) else source:
        if not Path(one).exists() and _looks_like_hub_id(one):
            yield from _read_hub(one)
            continue
        for path in find_files(one):
            yield from read_file(path)


def cast_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The same rows with the columns and types of `schema` (missing columns become null)."""
    return _concat([schema.empty_table(), table], "rows").select(schema.names)


def find_files(source: str) -> list[Path]:
    """Data files of a path: itself, or those of a directory (its most frequent format; others are named in a warning).

    Raises ValueError for a path that is missing, of an unknown format, or a directory without data files.
    """
    path = Path(source)
    if path.is_file():
        if format_of(path) is None:
            raise ValueError(f"{source}: unknown file format. Known: {', '.join(sorted(FORMATS))} (json, csv also .gz)")
        return [path]
    if not path.is_dir():
        raise ValueError(f"{source}: no such file or directory.{_nearest_path(path)}")
    hidden = [p for p in path.rglob("*") if any(part.startswith(".") for part in p.relative_to(path).parts)]
    files = sorted(p for p in path.rglob("*") if p.is_file() and p not in hidden and p.name not in NOT_DATA)
    counts = Counter(fmt for fmt in map(format_of, files) if fmt)
    if not counts:
        raise ValueError(f"{source}: no data files in this directory. Known formats: {', '.join(sorted(FORMATS))}")
    chosen = counts.most_common(1)[0][0]
    left_out = [p.name for p in files if format_of(p) not in (chosen, None)]
    if left_out:
        logger.warning("%s: reads its %s files; not read: %s", source, chosen, ", ".join(left_out[:5]))
    return [p for p in files if format_of(p) == chosen]


def require_column(columns: Iterable[str], name: str, *, key: str, source: str) -> None:
    """Raise ValueError when `name`, given by the setting `key`, is not a column; names the nearest one."""
    columns = list(columns)
    if name in columns:
        return
    near = nearest_name(name, columns)
    hint = f" Did you mean '{near}'?" if near else ""
    raise ValueError(f"{key}: '{name}' is not a column of {source} (columns: {', '.join(columns)}).{hint}")


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs in case only, else the closest spelling, else None."""
    known = list(known)
    for candidate in known:
        if candidate.lower() == name.lower():
            return candidate
    lowered = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.6)
    return lowered[close[0]] if close else None


def _concat(tables: list[pa.Table], name: str) -> pa.Table:
    """One table, types widened where that loses nothing (int to float, null to anything, objects joined)."""
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
        raise ValueError(
            f"{name}: a column has different types in different places ({error}). "
            "Give it one type in all rows and files, for example by writing its values as text"
        ) from error


def _looks_like_hub_id(source: str) -> bool:
    return (
        format_of(Path(source)) is None and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+){0,2}", source) is not None
    )


def _read_hub(source: str) -> Iterator[pa.Table]:
    """`name`, `name:config` or `name:config:split` (default split: train), read through the `datasets` library."""
    import datasets

    name, _, rest = source.partition(":")
    config, _, split = rest.partition(":")
    try:
        dataset = datasets.load_dataset(name, config or None, split=split or "train")
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{source}: neither a file or directory here nor a hub dataset that could be read "
            f"({type(error).__name__}: {error}).{_nearest_path(Path(source))}"
        ) from error
    yield from dataset.with_format("arrow").iter(batch_size=BATCH_ROWS)


def _nearest_path(path: Path) -> str:
    """' Did you mean X?' with the closest name in the deepest directory that exists, or ''."""
    parent = path.parent
    if not parent.is_dir():
        return f" Its directory {parent} does not exist either."
    near = nearest_name(path.name, (p.name for p in parent.iterdir()))
    return f" Did you mean {parent / near}?" if near else ""
