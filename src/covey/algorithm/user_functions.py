"""Functions by name: one of a table, or the user's own at "module:function"."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any


def user_function(key: str, name: str, known: Iterable[str]) -> Callable[..., Any]:
    """The function at "module:function", the working directory included; ValueError that names the key otherwise.

    known: names of the built-in ones, for the message.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        near = get_close_matches(name, known, n=1)
        hint = f", did you mean {near[0]!r}?" if near else ";"
        raise ValueError(f"{key}: {name!r} is unknown{hint} known: {', '.join(known)}, or module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script's path begins with its own directory
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{key}: {name!r} is not found ({error}); known: {', '.join(known)}, or module:function"
        ) from error
    if not callable(function):
        raise ValueError(f"{key}: {name!r} is a {type(function).__name__}, not a function")
    return function
