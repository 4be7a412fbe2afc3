"""Values and messages between judge and candidate: JSON lines over pipes, exact builtin types only."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable
from typing import Any

Json = Any

_MAX_MESSAGE = 4 * 2**20  # bytes
_CONTAINERS: dict[str, Callable[..., Any]] = {"l": list, "t": tuple, "s": set, "z": frozenset}


class Failure(BaseException):
    """The candidate is gone, hangs, or sent what it must not. No Exception, so that tests do not catch it."""


class Link:
    """Messages of one JSON line each over two pipes."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._buffer = read, write, b""

    def send(self, message: Json) -> None:
        """Write one message."""
        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._write, data) :]
        except BrokenPipeError:
            raise Failure("the program ended") from None

    def receive(self, deadline: float | None = None) -> Json:
        """The next message; Failure when there is none by `deadline` (monotonic clock), or it is too large."""
        while b"\n" not in self._buffer:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._read], [], [], wait)[0]:
                raise Failure("time limit")
            chunk = os.read(self._read, 65536)
            if not chunk or len(self._buffer) > _MAX_MESSAGE:
                raise Failure("result too large" if chunk else "the program ended")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


def encode(value: Any, other: Callable[[Any], Json]) -> Json:
    """JSON form of plain data; `other` encodes what is not plain."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if isinstance(value, (int, float)):
        return ["i", hex(value)] if isinstance(value, int) else ["f", float.__repr__(value)]
    if isinstance(value, complex):
        return ["c", repr(complex(value))]
    if isinstance(value, (bytes, bytearray)):
        return ["b", bytes(value).hex()]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, dict):
        return ["d", [[encode(k, other), encode(v, other)] for k, v in dict.items(value)]]
    for tag, container in (("l", list), ("t", tuple), ("s", set), ("z", frozenset)):
        if isinstance(value, container):
            return [tag, [encode(item, other) for item in value]]
    name = f"{kind.__module__}.{kind.__name__}"
    if name == "collections.deque":
        return ["l", [encode(item, other) for item in value]]
    if name in ("fractions.Fraction", "decimal.Decimal"):
        return ["q", kind.__name__, str(value)]
    return other(value)


def decode(form: Json, handle: Callable[[int], Any]) -> Any:
    """The value of a JSON form, of exact builtin types; `handle` stands for what was not plain."""
    if not isinstance(form, list):
        return form
    tag, content = form[0], form[1]
    if tag in _CONTAINERS:
        return _CONTAINERS[tag](decode(item, handle) for item in content)
    if tag == "d":
        return {decode(k, handle): decode(v, handle) for k, v in content}
    if tag == "q":
        import decimal
        import fractions

        return {"Fraction": fractions.Fraction, "Decimal": decimal.Decimal}[content](form[2])
    if tag == "o":
        return handle(content)
    return {"i": lambda x: int(x, 16), "f": float, "c": complex, "b": bytes.fromhex}[tag](content)
