"""The process that runs reward functions: `python -m covey.rewards.worker FD`, started by pool.py.

A fresh interpreter, not a fork: a fork would copy the trainer's threads' locks and its device context. It talks to the
pool over the socket FD, in pickles: first (sys.path, specs) comes in and ("ready", forms) or ("failed", message) goes
out; then for every (job_id, spec_index, responses, row, extras) one ("outcome", job_id, index, outcome) per response.
It ends when the socket closes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from multiprocessing.connection import Connection

from covey.rewards.execute import load, run

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Load the functions of the run, then score jobs until the pool goes away."""
    connection = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    _die_with_parent()
    os.dup2(2, 1)  # what a reward function prints must not mix with the trainer's output
    try:
        path, specs = connection.recv()
        sys.path[:] = path
        try:
            functions = [load(spec) for spec in specs]
        except ValueError as error:
            connection.send(("failed", str(error)))
            return
        connection.send(("ready", [(function.form, function.is_async) for function in functions]))
        while True:
            job_id, index, responses, row, extras = connection.recv()
            rows = [{**row, **extra} for extra in extras]
            for position, outcome in run(specs[index], functions[index], responses, rows):
                connection.send(("outcome", job_id, position, outcome))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _die_with_parent() -> None:
    """On Linux, be killed when the trainer dies, even while busy in a reward function."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
