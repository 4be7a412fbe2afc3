"""`covey preprocess FILE.yaml`: raw rows -> PREFIX.parquet with token ids and every raw column, and its manifest.

Two passes over the input: the first finds the schema of all rows, and every broken line, before anything is written;
the second renders batches of a thousand rows and writes them in order. Memory does not depend on the number of rows,
except a hash a row for `drop_duplicates`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from covey.data import stats
from covey.data.handlers import HANDLERS
from covey.data.interleave import interleave
from covey.data.manifest import SUFFIX, read_manifest, source_identity, tokenizer_identity, write_manifest
from covey.data.output import PromptWriter
from covey.data.prompts import Prepared
from covey.data.rows import cast_table, read_tables, require_column, scan
from covey.data.settings import PreprocessConfig, load_settings
from covey.data.workers import Job, load_tokenizer, make_handler, plan_workers, prepare_batches

logger = logging.getLogger(__name__)


def run(path: str | Path, overrides: Sequence[str] = (), *, quiet: bool = False) -> dict[str, Any]:
    """Preprocess by the settings of a YAML file; returns the report and, unless quiet, prints it.

    Raises ValueError (ConfigError for the YAML) with file, line and fix; then nothing is left behind.
    """
    from rich.console import Console

    config, warnings = load_settings(path, overrides)
    for warning in warnings:
        logger.warning(warning)
    report = {**preprocess(config, show=not quiet), "warnings": warnings}
    if not quiet:
        console = Console(highlight=False)
        console.print(stats.describe(report), markup=False, soft_wrap=True)
        for file in report["files"]:
            console.print(f"{'up to date' if report['cached'] else 'wrote'}: {file}", markup=False, soft_wrap=True)
    return report


def preprocess(config: PreprocessConfig, *, show: bool = False) -> dict[str, Any]:
    """The same for settings in memory. The report: rows_in, rows_out, drops by reason, lengths, files, seconds."""
    started = time.monotonic()
    tokenizer = load_tokenizer(config.tokenizer_name_or_path)
    known: dict[str, Any] = {
        "config": config.model_dump(exclude={"overwrite_cache", "log_interval", "workers"}),
        "sources": source_identity(config.input),
        "tokenizer": tokenizer_identity(tokenizer),
    }
    cached = None if config.overwrite_cache or config.handler_name not in HANDLERS else _cached(config, known)
    if cached is not None:
        return {**cached, "cached": True}
    schema, num_rows = scan(config.input)
    source = config.input if isinstance(config.input, str) else ", ".join(config.input)
    job = Job(config, schema.names, source)
    handler = make_handler(job, tokenizer)
    for key in config.dataset_additional_keys:
        if key != "labels":
            require_column(schema.names, key, key="dataset_additional_keys", source=source)
    workers = plan_workers(config.workers, num_rows)
    keys = config.dataset_additional_keys if config.format == "megatron" else None
    tally = _Tally(drop_duplicates=config.drop_duplicates)
    manifest_path = Path(config.output_prefix + SUFFIX)
    with (
        PromptWriter(config.output_prefix, raw_columns=schema.names, megatron_keys=keys, tokenizer=tokenizer) as writer,
        _progress(num_rows, config.log_interval, show=show) as advance,
    ):
        for rows_read, prepared in prepare_batches(job, handler, _read(config, schema), workers):
            table = tally.add(rows_read, prepared)
            if table.num_rows:
                writer.write(table)
            advance(rows_read)
        report = tally.report(num_rows)
        if writer.num_rows == 0:
            raise ValueError(
                f"{source}: none of {num_rows} rows is left: {report['drops']}. Check map_keys and seq_length"
            )
        manifest_path.unlink(missing_ok=True)  # from here until the new one is there, training refuses the data
        files = writer.commit()
    seconds = time.monotonic() - started
    report |= {
        "prompt_type": handler.renderer.prompt_type,
        "stop_words": list(handler.renderer.stop_words),
        "stop_token_ids": handler.renderer.stop_token_ids,
        "files": [*files, str(manifest_path)],
        "processes": workers.processes,
        "threads": workers.threads,
        "seconds": round(seconds, 3),
    }
    file = {"name": writer.path.name, "bytes": writer.path.stat().st_size}
    write_manifest(manifest_path, {**known, "file": file, "report": report})
    return {**report, "cached": False}


class _Tally:
    """Counts over all batches, and the prompts seen."""

    def __init__(self, *, drop_duplicates: bool) -> None:
        self._seen: set[bytes] | None = set() if drop_duplicates else None
        self._drops: Counter[str] = Counter()
        self._lengths: dict[str, Counter[int]] = {"prompt": Counter(), "response": Counter()}
        self._rows_read = self._rows_out = self._without_response = 0

    def add(self, rows_read: int, prepared: Prepared) -> pa.Table:
        """Count a batch; returns its rows without those whose prompt came before."""
        table, response_lengths = prepared.table, prepared.response_lengths
        self._rows_read += rows_read
        self._drops.update(prepared.drops)
        if self._seen is not None:
            first = np.array([self._is_new(text) for text in table["prompt_text"].to_pylist()], dtype=bool)
            if not first.all():
                self._drops["duplicate"] += int((~first).sum())
                table, response_lengths = table.filter(pa.array(first)), response_lengths[first]
        prompt_lengths = [np.diff(chunk.offsets) for chunk in table["input_ids"].chunks]
        for name, lengths in (("prompt", prompt_lengths), ("response", [response_lengths[response_lengths >= 0]])):
            values, counts = np.unique(np.concatenate([*lengths, np.zeros(0, int)]), return_counts=True)
            self._lengths[name].update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        self._rows_out += table.num_rows
        self._without_response += table["response"].null_count
        return table

    def report(self, num_rows: int) -> dict[str, Any]:
        """The figures as plain values."""
        if self._rows_read < num_rows:
            self._drops["not_drawn"] = num_rows - self._rows_read
        return {
            "rows_in": num_rows,
            "rows_out": self._rows_out,
            "drops": dict(self._drops),
            "rows_without_response": self._without_response,
            **{f"{name}_length": stats.summarize(counts) for name, counts in self._lengths.items()},
            "lengths": {name: {str(n): c for n, c in sorted(counts.items())} for name, counts in self._lengths.items()},
        }

    def _is_new(self, text: str) -> bool:
        assert self._seen is not None
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True


def _read(config: PreprocessConfig, schema: pa.Schema) -> Iterator[pa.Table]:
    if config.interleave_probs is not None and isinstance(config.input, list):
        return interleave(config.input, config.interleave_probs, seed=config.seed, schema=schema)
    return (cast_table(table, schema) for table in read_tables(config.input))


def _cached(config: PreprocessConfig, known: dict[str, Any]) -> dict[str, Any] | None:
    """The report of an earlier run with the same settings, files and tokenizer, when its output is still whole."""
    path = Path(config.output_prefix + SUFFIX)
    if not path.is_file():
        return None
    manifest = read_manifest(path)
    same = all(manifest.get(key) == value for key, value in json.loads(json.dumps(known)).items())
    data = path.with_name(manifest["file"]["name"])
    whole = data.is_file() and data.stat().st_size == manifest["file"]["bytes"]
    present = all(Path(file).is_file() for file in manifest["report"]["files"])
    return manifest["report"] if same and whole and present else None


@contextlib.contextmanager
def _progress(num_rows: int, log_interval: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """A function to call with rows done: a bar on a terminal, else a line every `log_interval` rows."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    if show and console.is_terminal:
        with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console) as bar:
            task = bar.add_task("rows", total=num_rows)
            yield lambda count: bar.advance(task, count)
        return
    done, started = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if show and done // log_interval > before // log_interval:
            rate = done / (time.monotonic() - started)
            logger.info("%s of %s rows (%.0f rows/s)", f"{done:,}", f"{num_rows:,}", rate)

    yield advance
