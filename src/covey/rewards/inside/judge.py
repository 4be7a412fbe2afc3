"""The judge: runs the tests' code, with the program's names standing for calls to the candidate."""

from __future__ import annotations

import builtins
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from .wire import Failure, Json, Link, decode, encode


class Unsupported(BaseException):
    """The test needs something that cannot be sent to the candidate: no verdict."""


class Remote:
    """A function, class or object of the program, as the tests see it. It has no equality and no order."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, ask: Callable[..., Any], index: int) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_index", index)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the program's function returns."""
        return self._ask("call", self._index, [list(args), kwargs])

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", self._index, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", self._index, [name, value])

    def __iter__(self) -> Any:
        return iter(self._ask("iter", self._index, None))

    def __eq__(self, other: object) -> bool:
        raise TypeError("the program returned an object that is not plain data: it cannot be compared")

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__


def _forward(op: str) -> Callable[..., Any]:
    return lambda self, *given: self._ask(op, self._index, given[0] if len(given) == 1 else list(given) or None)


for _op in ("next", "len", "bool", "str", "getitem", "setitem", "contains"):
    setattr(Remote, f"__{_op}__", _forward(_op))


class Judge:
    """One program under test."""

    def __init__(self, link: Link, task: Json) -> None:
        self._link, self._task, self._deadline = link, task, 0.0

    def run(self, report: Callable[[Json], None]) -> None:
        """Run the tests one by one and report each as soon as it is known."""
        self._restart_clock()
        self._link.send({"program": self._task["program"]})
        loaded = self._link.receive(self._deadline)
        if "error" in loaded:
            raise Failure(f"{loaded['error'][0]}: {loaded['error'][1]}")
        namespace: dict[str, Any] = {"__name__": "tests"}
        for name in decode(loaded["ok"], self._remote):
            # A program's own `abs` must not replace the one that the tests compare with.
            if type(name) is str and (not hasattr(builtins, name) or name == self._task["entry_point"]):
                namespace[name] = self._ask("name", 0, name)
        for position, (source, is_test) in enumerate(self._task["tests"]):
            self._restart_clock()
            why = run_test(source, namespace, self._task["test_s"])
            if is_test or why:
                report({"test": position, "passed": not why, "why": why})

    def _restart_clock(self) -> None:
        self._deadline = time.monotonic() + self._task["test_s"]

    def _remote(self, index: int) -> Remote:
        return Remote(self._ask, index)

    def _ask(self, op: str, index: int, given: Any) -> Any:
        self._link.send({"op": op, "id": index, "args": encode(given, _unsendable)})
        reply = self._link.receive(self._deadline)
        if op == "call":
            for position, form in enumerate(reply.get("args") or ()):
                update_in_place(given[0][position], decode(form, self._remote))
        if "error" not in reply:
            return decode(reply["ok"], self._remote)
        kind = getattr(builtins, str(reply["error"][0]), None)
        known = isinstance(kind, type) and issubclass(kind, Exception)
        raise (kind if known else RuntimeError)(str(reply["error"][1]))  # type: ignore[misc]


def run_test(source: str, namespace: dict[str, Any], seconds: float) -> str:
    """Execute one statement of the tests; "" when it passed, else why not."""

    def ring(*_: object) -> NoReturn:
        raise Failure("time limit")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds + 0.2)
    try:
        exec(compile(source, "<test>", "exec"), namespace)
    except (Failure, Unsupported):
        raise
    except BaseException as error:  # noqa: BLE001 - a failed test, whatever it raised
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return ""


def update_in_place(old: Any, new: Any) -> None:
    """Show the test what the program did to a list, map or set that it was passed."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = new
    elif isinstance(old, (dict, set)) and isinstance(new, type(old)):
        old.clear()
        old.update(new)  # type: ignore[arg-type]


def _unsendable(value: Any) -> Json:
    if isinstance(value, Remote):
        return ["o", value._index]
    raise Unsupported(f"the test passes a {type(value).__name__}, which cannot be sent to the program")
