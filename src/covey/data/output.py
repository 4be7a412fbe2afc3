"""Writing prepared rows: PREFIX.parquet, and for Megatron the pairs PREFIX_packed_KEY_document.bin/.idx.

Everything is written under temporary names in the same directory and renamed at the end; a failure removes it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import parquet

from covey.data.indexed_dataset import IndexedDatasetWriter, document_path
from covey.data.prompts import OWN_COLUMNS
from covey.data.rendering import encode_texts
from covey.data.rows import cast_table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = {b"covey": b"prompts"}  # metadata of the parquet file: training then asks for its manifest
TABLES_PER_GROUP = 10  # ten thousand rows


class PromptWriter:
    """`with PromptWriter(prefix) as writer: writer.write(table); files = writer.commit()`."""

    def __init__(
        self,
        prefix: str,
        *,
        raw_columns: list[str],
        megatron_keys: list[str] | None,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """`megatron_keys`: columns to write as tokens beside input_ids and response; None: no Megatron files."""
        self.path = Path(prefix + ".parquet")
        self.num_rows = 0
        self._temporary = self.path.with_name(self.path.name + ".tmp")
        self._raw_columns = {*raw_columns, *(f"raw_{name}" for name in raw_columns), *OWN_COLUMNS}
        self._tokenizer = tokenizer
        self._keys = [] if megatron_keys is None else list(dict.fromkeys(["response", *megatron_keys]))
        names = [] if megatron_keys is None else ["input_ids", "attention_mask", *self._keys]
        self._indexed = {name: IndexedDatasetWriter(document_path(prefix, name)) for name in names}
        self._waiting: list[pa.Table] = []
        self._writer: parquet.ParquetWriter | None = None

    def __enter__(self) -> PromptWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
        self._temporary.unlink(missing_ok=True)
        for writer in self._indexed.values():
            writer.discard()

    def write(self, table: pa.Table) -> None:
        """Append rows; columns that a user's handler adds get their type from the first row that has a value."""
        self.num_rows += table.num_rows
        self._waiting.append(table)
        if len(self._waiting) >= TABLES_PER_GROUP and not self._has_untyped_columns(table.schema):
            self._flush()
        if self._indexed:
            self._write_indexed(table)

    def commit(self) -> list[str]:
        """Put all files in place and return their paths."""
        self._flush()
        assert self._writer is not None
        self._writer.close()
        with open(self._temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(self._temporary, self.path)
        return [str(self.path), *(path for writer in self._indexed.values() for path in writer.commit())]

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = pa.concat_tables(self._waiting, promote_options="permissive")
        self._waiting = []
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._temporary, table.schema.with_metadata(MARK), compression="zstd")
        self._writer.write_table(cast_table(table, self._writer.schema))

    def _has_untyped_columns(self, schema: pa.Schema) -> bool:
        """Whether a handler's column had nothing but null or empty lists so far."""
        added = [field.type for field in schema if field.name not in self._raw_columns]
        return any(pa.types.is_null(t) or (pa.types.is_list(t) and pa.types.is_null(t.value_type)) for t in added)

    def _write_indexed(self, table: pa.Table) -> None:
        for ids in table["input_ids"].to_pylist():
            self._indexed["input_ids"].append(ids)
            self._indexed["attention_mask"].append([1] * len(ids))
        for key in self._keys:
            for tokens in self._tokens(table[key].to_pylist()):
                self._indexed[key].append(tokens)

    def _tokens(self, values: list[Any]) -> list[list[int]]:
        """Lists of whole numbers are ids already; other values are written as text (JSON when not text)."""
        if all(isinstance(v, list) and v and all(type(i) is int for i in v) for v in values):
            return values
        texts = [
            v if isinstance(v, str) else "" if v is None else json.dumps(v, ensure_ascii=False, default=str)
            for v in values
        ]
        return encode_texts(self._tokenizer, texts)
