"""Entry of the sandboxed process: `main.run(arguments)` with the task on standard input, verdicts on standard output.

Modes: `calls` (assert statements, check functions), `stdio` (one run per input), `script` (just run the program).
"""

from __future__ import annotations

import json
import os
import sys

from .candidate import serve
from .confine import confine, detach
from .judge import Judge, Unsupported
from .programs import run_inputs, run_main
from .wire import Failure, Json, Link


def run(arguments: str) -> None:
    """Confine this process, then do what the arguments and standard input say."""
    given = json.loads(arguments)
    confine(given["uid"], given["rlimits"])
    if given["mode"] == "script":
        run_main(sys.stdin.read())
    link = _fork_candidate() if given["mode"] == "calls" else None  # before the tests and the nonce are read
    task = json.loads(sys.stdin.read())

    def report(line: Json) -> None:
        os.write(1, json.dumps({**line, "nonce": task["nonce"]}).encode() + b"\n")

    try:
        if link is None:
            run_inputs(task, report)
        else:
            Judge(link, task).run(report)
    except Unsupported as error:
        report({"unsupported": str(error)})
    except (Failure, OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        report({"failure": str(error) or type(error).__name__})
    os._exit(0)


def _fork_candidate() -> Link:
    """The judge's link to a fresh candidate, which shares no file with it but the link's pipes."""
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    if os.fork():
        os.close(to_read)
        os.close(from_write)
        return Link(from_read, to_write)
    detach(to_read, from_write)
    os.dup2(0, 3)
    os.dup2(1, 4)
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    os.dup2(0, 1)
    try:
        serve(Link(3, 4))
    finally:
        os._exit(0)
