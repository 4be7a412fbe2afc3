"""Whole programs: run with an input, return what they print. Their outputs are compared outside the sandbox."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from .confine import detach
from .wire import Json


def run_inputs(task: Json, report: Callable[[Json], None]) -> None:
    """Run the program once per input, each in its own process, and report what it printed."""
    for position, text in enumerate(task["inputs"]):
        in_read, in_write = os.pipe()
        out_read, out_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            detach(in_read, out_write)
            run_main(task["program"])
        os.close(in_read)
        os.close(out_write)
        output, why = exchange(in_write, out_read, text.encode(), task["test_s"], task["output_bytes"])
        if why:
            os.killpg(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        report({"test": position, "output": output.decode(errors="replace"), "why": why or _describe(status)})


def run_main(program: str) -> NoReturn:
    """Run the program as a script and end this process."""
    code: Any = 1
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        code = 0
    except SystemExit as error:
        code = error.code or 0
    except BaseException as error:  # noqa: BLE001 - an uncaught exception of the program
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace")[:500])
    try:
        sys.stdout.flush()
    finally:
        os._exit(code & 255 if isinstance(code, int) else 1)


def exchange(stdin: int, stdout: int, data: bytes, seconds: float, max_bytes: int) -> tuple[bytes, str]:
    """(output, why it was cut short) of feeding `data` and reading until the end, the time or the size limit."""
    deadline, output, why = time.monotonic() + seconds, b"", ""
    os.set_blocking(stdin, False)
    writers = [stdin]
    while not why:
        if writers and not data:
            os.close(writers.pop())
        readable, writable, _ = select.select([stdout], writers, [], max(0.0, deadline - time.monotonic()))
        if writable:
            try:
                data = data[os.write(stdin, data[:65536]) :]
            except BrokenPipeError:
                data = b""
        if readable:
            chunk = os.read(stdout, 65536)
            output += chunk
            if not chunk:
                break
        if len(output) > max_bytes or time.monotonic() > deadline:
            why = "output limit" if len(output) > max_bytes else "time limit"
    for fd in (stdout, *writers):
        os.close(fd)
    return output[:max_bytes], why


def _describe(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"ended by signal {os.WTERMSIG(status)}"
    return f"exit code {os.WEXITSTATUS(status)}" if status else ""
