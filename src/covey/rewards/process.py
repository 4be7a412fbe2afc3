"""Feed a child process, read what it writes, watch its limits, and end it with all that it started."""

from __future__ import annotations

import logging
import os
import resource
import selectors
import signal
import subprocess
import time
from pathlib import Path

log = logging.getLogger(__name__)

_POLL_S = 0.05  # how often limits are looked at


def exchange(
    process: subprocess.Popen[bytes],
    data: bytes,
    *,
    deadline: float,  # monotonic clock
    max_output: int,  # bytes
    max_memory: int,  # bytes resident in the process and its descendants together
) -> tuple[bytes, str]:
    """(output, limit that was passed: wall, output, memory or "") of feeding `data` and reading to the end."""
    assert process.stdin is not None
    assert process.stdout is not None
    output, next_look = bytearray(), time.monotonic() + 2 * _POLL_S
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        while True:
            for key, _ in selector.select(_POLL_S):
                if key.fileobj is process.stdin:
                    data = _write_some(process.stdin.fileno(), data)
                    if not data:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                chunk = os.read(process.stdout.fileno(), 65536)
                if not chunk:
                    return bytes(output), _wait(process, deadline)
                output += chunk
            now = time.monotonic()
            if len(output) > max_output:
                return bytes(output[:max_output]), "output"
            if now > deadline:
                return bytes(output), "wall"
            if now > next_look:
                next_look = now + _POLL_S
                if _resident_bytes(process.pid) > max_memory:
                    return bytes(output), "memory"


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill and reap. With bubblewrap the end of its process ends the whole process namespace."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError) as error:
        log.debug("sandbox process group %d: %s", process.pid, error)
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _write_some(fd: int, data: bytes) -> bytes:
    """What is left of `data`; nothing when the other side is gone."""
    try:
        return data[os.write(fd, data[:65536]) :]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return b""


def _wait(process: subprocess.Popen[bytes], deadline: float) -> str:
    """Wait for a process that has closed its output; "wall" when it does not end in time."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return "wall"
    return ""


def _resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants (Linux; 0 elsewhere)."""
    total, waiting = 0, [pid]
    while waiting:
        one = waiting.pop()
        try:
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * resource.getpagesize()
            waiting += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
        except (OSError, IndexError, ValueError):
            continue  # it ended meanwhile
    return total
