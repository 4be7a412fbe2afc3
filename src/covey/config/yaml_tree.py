"""YAML with memory: plain values, and for every key the place it was written at.

`read_tree` collects every structural problem of a file (syntax, duplicate keys, keys that are not text) instead of
stopping at the first. `apply_override` puts a command-line `a.b[0].c=value` over the tree. Numbers such as `1e-6`,
text to YAML 1.1, are read as numbers. Paths are tuples of map keys and list indices: ("reward", "functions", 0).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One thing a user has to change.

    Example: Problem("run.yaml:7", "train.lr", "'fast'", "needs a number of at least 0")
    """

    place: str  # file:line, or "--set"
    key: str  # dotted path; empty when the problem is the file's
    value: str  # as shown to the user; empty when there is none
    reason: str  # why it is wrong and what to do

    def __str__(self) -> str:
        subject = f"{self.key} = {self.value}: " if self.value else f"{self.key}: " if self.key else ""
        return f"{self.place}: {self.reason if self.reason.startswith(self.key) else subject + self.reason}"


class ConfigError(ValueError):
    """A configuration that cannot be used; its text is the report for the user."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        """Report `problems` (at least one) of `source`, a file's name."""
        self.source = source
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{source} has {count}:", *map(str, self.problems)]))


@dataclass
class Tree:
    """A file's values with their places.

    Example of `lr: 1e-6` on line 3: data {"lr": 1e-6}, places {("lr",): "run.yaml:3"}, texts {("lr",): "1e-6"}
    """

    source: str
    data: Any = None
    places: dict[KeyPath, str] = field(default_factory=dict)
    texts: dict[KeyPath, str] = field(default_factory=dict)  # unquoted scalars as written: 007 stays 007 in a name
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: KeyPath) -> str:
        """Where `path`, or the nearest map around it, was written."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.source)


def read_tree(path: str | Path) -> Tree:
    """Read a YAML file. Unreadable or malformed files raise ConfigError; key problems are listed in `problems`."""
    source = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(p.name for p in Path(path).parent.glob("*.y*ml"))[:8] if Path(path).parent.is_dir() else []
        hint = f"; YAML files there: {', '.join(near)}" if near else ""
        raise ConfigError(source, [Problem(source, "", "", f"no such file{hint}")]) from None
    except IsADirectoryError:
        raise ConfigError(source, [Problem(source, "", "", "is a directory; name the YAML file in it")]) from None
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 text (byte {error.start}); save the file as UTF-8"
        raise ConfigError(source, [Problem(source, "", "", reason)]) from None
    return parse_tree(text, source)


def parse_tree(text: str, source: str, *, lines: bool = True) -> Tree:
    """Parse YAML text; places are `source:line`, or `source` alone without `lines`."""
    loader: _Loader | None = None
    tree = Tree(source)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _Reader(tree, loader, lines).read(node, ())
    except yaml.YAMLError as error:
        raise ConfigError(source, [_syntax_problem(error, source, lines)]) from None
    finally:
        if loader is not None:
            loader.dispose()
    return tree


def apply_override(tree: Tree, override: str) -> None:
    """Put `a.b=value` (value in YAML) into the tree; mistakes are added to `tree.problems`."""
    place, (dotted, equals, text) = "--set", override.partition("=")
    path = parse_path(dotted.strip())
    if not equals or path is None:
        reason = "must be KEY=VALUE, for example --set train.lr=1e-6 or --set reward.functions[0].weight=2"
        tree.problems.append(Problem(f"{place} {override}", "", "", reason))
        return
    try:
        value = parse_tree(text, place, lines=False)
    except ConfigError as error:
        reason = f"{error.problems[0].reason}; the value is YAML: put text with special characters in quotes"
        tree.problems.append(Problem(place, dotted, repr(text), reason))
        return
    tree.problems += [Problem(place, dotted, repr(text), problem.reason) for problem in value.problems]
    if tree.data is None:
        tree.data = {}
    parent = tree.data
    for depth, part in enumerate(path[:-1]):
        if isinstance(parent, dict) and isinstance(part, str):
            if parent.get(part) is None:  # an absent or empty section
                parent[part] = {}
            parent = parent[part]
        elif isinstance(parent, list) and isinstance(part, int) and part < len(parent):
            parent = parent[part]
        else:
            tree.problems.append(_unreachable(place, path, depth, override))
            return
    last = path[-1]
    if not (isinstance(parent, dict) and isinstance(last, str)) and not (
        isinstance(parent, list) and isinstance(last, int) and last < len(parent)
    ):
        tree.problems.append(_unreachable(place, path, len(path) - 1, override))
        return
    for known in (tree.places, tree.texts):
        for below in [p for p in known if p[: len(path)] == path]:
            del known[below]
    parent[last] = value.data  # type: ignore[index]  # checked just above
    tree.places.update({path + below: place for below in value.places} | {path: place})
    tree.texts.update({path + below: written for below, written in value.texts.items()})


def parse_path(dotted: str) -> KeyPath | None:
    """`a.b[0].c` -> ("a", "b", 0, "c"); None when it is not a path."""
    if not re.fullmatch(r"[\w-]+(\[\d+\])*(\.[\w-]+(\[\d+\])*)*", dotted):
        return None
    return tuple(int(index) if index else name for name, index in re.findall(r"([\w-]+)(?![\w-]*\])|\[(\d+)\]", dotted))


def dotted(path: KeyPath) -> str:
    """("a", "b", 0) -> `a.b[0]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def shown(value: Any) -> str:
    """A value as the reports show it: JSON on one line, at most 80 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _unreachable(place: str, path: KeyPath, depth: int, override: str) -> Problem:
    value = override.partition("=")[2]
    if isinstance(path[depth], int):
        return Problem(place, dotted(path), value, f"{dotted(path[:depth])} has no entry {path[depth]} to change")
    return Problem(place, dotted(path), value, f"{dotted(path[:depth])} is not a map, it has no key {path[depth]}")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 without dates and base-60 numbers, and with 1e-6 as a number."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if not tag.endswith((":timestamp", ":int", ":float"))  # replaced below
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"([-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+.0123456789"),
)


@dataclass
class _Reader:
    """Turns nodes into values, noting places; `open_nodes` finds an alias inside its own anchor."""

    tree: Tree
    loader: _Loader
    lines: bool
    open_nodes: set[int] = field(default_factory=set)

    def place(self, node: yaml.Node) -> str:
        return f"{self.tree.source}:{node.start_mark.line + 1}" if self.lines else self.tree.source

    def read(self, node: yaml.Node, path: KeyPath) -> None:
        self.tree.data = self.value(node, path)

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self.tree.places.setdefault(path, self.place(node))
        if isinstance(node, yaml.ScalarNode):
            if node.style is None:
                self.tree.texts[path] = node.value
            return self.loader.construct_object(node)
        if id(node) in self.open_nodes:
            raise yaml.constructor.ConstructorError(None, None, "an alias refers to itself", node.start_mark)
        self.open_nodes.add(id(node))
        result = self.map(node, path) if isinstance(node, yaml.MappingNode) else self.list(node, path)
        self.open_nodes.discard(id(node))
        return result

    def list(self, node: yaml.Node, path: KeyPath) -> list[Any]:
        return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]

    def map(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        first: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.tree.problems.append(Problem(self.place(key), dotted(path), "", "a key must be plain text"))
            elif key.value in first and key.value != "<<":
                reason = f"duplicate key, first given on line {first[key.value].start_mark.line + 1}; keep one"
                self.tree.problems.append(Problem(self.place(key), dotted((*path, key.value)), "", reason))
            else:
                first[key.value] = key
        self.loader.flatten_mapping(node)  # << merges: merged pairs come first, the map's own follow and win
        result: dict[str, Any] = {}
        for key, item in node.value:
            if isinstance(key, yaml.ScalarNode):
                child = (*path, key.value)
                self.tree.places[child] = self.place(key)
                result[key.value] = self.value(item, child)
        return result


def _syntax_problem(error: yaml.YAMLError, source: str, lines: bool) -> Problem:
    mark = getattr(error, "problem_mark", None)
    reason = str(getattr(error, "problem", None) or error).replace("\n", " ")
    if "\\t" in reason:
        reason = "YAML allows no tabs for indentation; use spaces"
    place = f"{source}:{mark.line + 1}" if mark is not None and lines else source
    column = f" (column {mark.column + 1})" if mark is not None and lines else ""
    return Problem(place, "", "", f"not valid YAML: {reason}{column}")
