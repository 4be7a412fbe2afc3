"""The candidate process: runs the model's program and answers the judge's calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .wire import Json, Link, decode, encode

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "name": lambda target, given: target[given],
    "call": lambda target, given: target(*given[0], **given[1]),
    "getattr": lambda target, given: getattr(target, given),
    "setattr": lambda target, given: setattr(target, *given),
    "getitem": lambda target, given: target[given],
    "setitem": lambda target, given: target.__setitem__(*given),
    "contains": lambda target, given: given in target,
    "iter": lambda target, _: list(target),
    "next": lambda target, _: next(target),
    "len": lambda target, _: len(target),
    "bool": lambda target, _: bool(target),
    "str": lambda target, _: str(target),
}


def serve(link: Link) -> None:
    """Run the program, then answer calls until the link closes."""
    program = link.receive()["program"]
    namespace: dict[str, Any] = {"__name__": "solution", "__builtins__": __builtins__}
    objects: list[Any] = [namespace]

    def keep(value: Any) -> Json:
        objects.append(value)
        return ["o", len(objects) - 1]

    def answer(do: Callable[[], Any]) -> Json:
        try:
            return {"ok": encode(do(), keep)}
        except BaseException as error:  # noqa: BLE001 - whatever the program raises belongs to the test
            return {"error": [type(error).__name__, str(error)[:500]]}

    def start() -> list[str]:
        exec(compile(program, "<program>", "exec"), namespace)
        return [name for name in namespace if not name.startswith("__")]

    link.send(answer(start))
    while True:
        request = link.receive()
        given = decode(request["args"], objects.__getitem__)
        operation, target = _OPERATIONS[request["op"]], objects[request["id"]]
        reply = answer(lambda operation=operation, target=target, given=given: operation(target, given))
        if request["op"] == "call":
            reply["args"] = [encode(a, keep) if isinstance(a, (list, dict, set)) else None for a in given[0]]
        link.send(reply)
