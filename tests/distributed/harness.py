"""Run a function in several gloo processes on this host, and get back what each returned.

Processes are forked from a server that has imported torch and Covey once, so that a run takes a second.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

_TIMEOUT_S = 120.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "transformers", "covey.trainer", "peft"])


def run(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(*args)` on ranks 0..world-1 with torchrun's variables set; AssertionError with the first traceback.

    The function must be importable by name, and args and result picklable.
    """
    results = _context.Queue()
    port = _free_port()
    processes = [
        _context.Process(target=_worker, args=(rank, world, port, results, function, args), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        return _collect(processes, results, world)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(processes: list[Any], results: Any, world: int) -> list[Any]:
    found: dict[int, Any] = {}
    end = time.monotonic() + _TIMEOUT_S
    while len(found) < world:
        try:
            rank, value, error = results.get(timeout=1.0)
        except queue.Empty:
            dead = [r for r, p in enumerate(processes) if r not in found and p.exitcode not in (None, 0)]
            assert not dead, f"ranks {dead} died without a word: {[processes[r].exitcode for r in dead]}"
            assert time.monotonic() < end, f"ranks {sorted(set(range(world)) - set(found))} gave no result"
            continue
        assert error is None, f"rank {rank}:\n{error}"
        found[rank] = torch.load(io.BytesIO(value), weights_only=False)
    return [found[rank] for rank in range(world)]


def _worker(rank: int, world: int, port: int, results: Any, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    if world > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    try:
        packed = io.BytesIO()  # tensors by value: the process ends before the parent reads them
        torch.save(function(*args), packed)
        results.put((rank, packed.getvalue(), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
