"""Give up privileges and set limits, before anything of the model's runs."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38


def confine(uid: int, rlimits: dict[str, int]) -> None:
    """Become `uid` (when root and not 0), unopenable by other processes of it, and limited.

    In this order: the process limit does not hold for root, so it is set after the change of user.
    """
    libc: Any = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        with open("/proc/self/oom_score_adj", "w") as file:  # if memory runs out, this goes first
            file.write("1000")
    if uid and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if sys.platform == "linux" and (
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    ):
        raise OSError(ctypes.get_errno(), "prctl")
    for name, value in rlimits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def detach(stdin: int, stdout: int) -> None:
    """In a fork: only these two files, a session of its own, and an end when the parent ends."""
    if sys.platform == "linux":
        libc: Any = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
    os.closerange(3, 256)
