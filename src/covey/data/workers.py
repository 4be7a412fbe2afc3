"""Batches of raw rows -> prepared batches, in order, in this process or in several.

Three quarters of the work is the tokenizer's, which has threads of its own: they are enough for a hundred thousand
rows. For more rows the rest of the work is spread over processes, which take seconds to start. They are spawned, not
forked: threads of Arrow and of the tokenizer do not survive a fork. At most twice as many batches as processes are in
flight, so memory stays flat.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from covey.data.handlers import AlpacaStyleInstructionHandler, find_handler
from covey.data.prompts import Prepared, prepare_table
from covey.data.rendering import Renderer
from covey.data.settings import PreprocessConfig
from covey.tokenizer import read_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_FOR_PROCESSES = 100_000  # below that, processes take longer to start than they save over threads


@dataclass(frozen=True)
class Job:
    """What a worker needs to know once."""

    config: PreprocessConfig
    columns: list[str]
    source: str  # for messages


@dataclass(frozen=True)
class Workers:
    """Who does the work: `processes` with one thread each, or one process whose tokenizer has `threads`."""

    processes: int
    threads: int


def plan_workers(wanted: int, num_rows: int) -> Workers:
    """No more than cores; processes only for rows that pay for their start."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = max(1, min(wanted, cores))
    return Workers(workers, 1) if num_rows >= ROWS_FOR_PROCESSES else Workers(1, workers)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer by directory or hub id. Raises ValueError when there is none."""
    try:
        return read_tokenizer(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer_name_or_path: no tokenizer at '{name}' ({str(error).splitlines()[0]}). "
            "Give the directory of the model to train, with tokenizer.json, or its hub id"
        ) from error


def make_handler(job: Job, tokenizer: PreTrainedTokenizerBase) -> AlpacaStyleInstructionHandler:
    """The job's handler with its template, checked against the columns. Raises ValueError with the fix."""
    config = job.config
    options = {} if config.enable_thinking is None else {"enable_thinking": config.enable_thinking}
    if config.enable_thinking is False and config.prompt_type not in ("chat", "auto", "qwen3"):
        options = {}  # upstream's default for every template; only a wish to think would be without effect
    renderer = Renderer(tokenizer, config.prompt_type, options=options, prompt_type_path=config.prompt_type_path)
    handler = find_handler(config.handler_name)(config.map_keys, tokenizer, renderer)
    handler.check_columns(job.columns, source=job.source)
    return handler


def prepare_batches(
    job: Job, handler: AlpacaStyleInstructionHandler, tables: Iterator[pa.Table], workers: Workers
) -> Iterator[tuple[int, Prepared]]:
    """(rows read, prepared batch) of every table, in order. Errors of workers are raised here."""
    if workers.processes == 1:
        first = 0
        with _tokenizer_threads(workers.threads):
            for table in tables:
                yield table.num_rows, _prepare(job, handler, table, first)
                first += table.num_rows
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers.processes, mp_context=context, initializer=_start, initargs=(job,))
    waiting: deque[tuple[int, Future[tuple[pa.Buffer, dict[str, int], np.ndarray]]]] = deque()
    first = 0
    try:
        for table in tables:
            waiting.append((table.num_rows, pool.submit(_work, _pack(table), first)))
            first += table.num_rows
            if len(waiting) >= 2 * workers.processes:
                yield _result(*waiting.popleft())
        while waiting:
            yield _result(*waiting.popleft())
    except BrokenProcessPool as error:
        raise ValueError("a preprocessing worker died, most likely for lack of memory: set workers lower") from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _tokenizer_threads(threads: int) -> Iterator[None]:
    """Inside, tokenizers run in so many threads. The library makes its threads once and then keeps their number."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    if threads > 1:
        os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


_job: Job | None = None
_handler: AlpacaStyleInstructionHandler | None = None


def _start(job: Job) -> None:
    global _job, _handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    _job, _handler = job, make_handler(job, load_tokenizer(job.config.tokenizer_name_or_path))


def _work(packed: pa.Buffer, first_row: int) -> tuple[pa.Buffer, dict[str, int], np.ndarray]:
    assert _job is not None and _handler is not None
    done = _prepare(_job, _handler, _unpack(packed), first_row)
    return _pack(done.table), done.drops, done.response_lengths


def _result(num_rows: int, future: Future[tuple[pa.Buffer, dict[str, int], np.ndarray]]) -> tuple[int, Prepared]:
    packed, drops, lengths = future.result()
    return num_rows, Prepared(_unpack(packed), drops, lengths)


def _prepare(job: Job, handler: AlpacaStyleInstructionHandler, table: pa.Table, first_row: int) -> Prepared:
    limit = job.config.seq_length
    return prepare_table(
        table,
        handler,
        max_length=None if limit is None else limit - 1,
        where=f"{job.source}, row {{}}",
        first_row=first_row,
        default_labels="labels" in job.config.dataset_additional_keys,
        count_response_tokens=True,
    )


def _pack(table: pa.Table) -> pa.Buffer:
    """Arrow's own format: pickle would send the whole buffers under a slice."""
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _unpack(packed: pa.Buffer) -> pa.Table:
    with ipc.open_stream(packed) as reader:
        return reader.read_all()
