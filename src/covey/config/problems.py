"""Everything that is wrong with a configuration's values, each with its place, the reason and the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from covey.config.fields import expects, expects_at, nearest_key, section_at, section_of, summary_of
from covey.config.schema import Config, Section, SftRunConfig
from covey.config.yaml_tree import KeyPath, Problem, Tree, dotted, shown


def field_problems(
    error: ValidationError, schema: type[Section], tree: Tree, data: dict[str, Any], bad: set[KeyPath]
) -> list[Problem]:
    """One problem per key; keys already reported by _Fit are left out. Adds the keys to `bad`."""
    problems: list[Problem] = []
    for item in error.errors(include_url=False):
        missing = item["type"] == "missing" and isinstance(item["loc"][-1], str)  # an index: the list is too short
        path = _existing(item["loc"], data, missing=missing)
        if path in bad or (item["type"] == "value_error" and section_at(schema, path) is not None):
            continue  # rules of whole sections are run one by one in _rule_problems
        bad.add(path)
        place, key = tree.place(path), dotted(path)
        if missing:
            problems += _missing(schema, path, place)
        elif item["type"] == "extra_forbidden":
            problems.append(Problem(place, key, shown(value_at(data, path)), _unknown_key(schema, path)))
        elif item["type"] == "value_error":
            problems.append(Problem(place, key, shown(value_at(data, path)), item["msg"].removeprefix("Value error, ")))
        else:
            problems.append(Problem(place, key, shown(value_at(data, path)), f"needs {expects_at(schema, path)}"))
    return problems


def _missing(schema: type[Section], path: KeyPath, place: str) -> list[Problem]:
    section = section_at(schema, path)
    if section is not None:
        inner = [name for name, info in section.model_fields.items() if info.is_required()]
        if inner:
            return [problem for name in inner for problem in _missing(schema, (*path, name), place)]
        reason = f"required section is missing ({summary_of(section)})"
        return [Problem(place, dotted(path), "", f"{reason}; add `{path[-1]}:` with its keys")]
    info = section_at(schema, path[:-1]).model_fields[str(path[-1])]  # type: ignore[union-attr]  # pydantic named it
    meaning = " ".join((info.description or "").split())
    return [Problem(place, dotted(path), "", f"required key is missing ({expects(info)}: {meaning})")]


def _unknown_key(schema: type[Section], path: KeyPath) -> str:
    if len(path) == 1:
        for other, command in ((Config, "train"), (SftRunConfig, "sft")):
            if other is not schema and path[0] in other.model_fields:
                return f"unknown key: a section of files for `covey {command}`"
    near = nearest_key(schema, path)
    if near:
        return f"unknown key; nearest known: {near}"
    return f"unknown key; known here: {', '.join((section_at(schema, path[:-1]) or schema).model_fields)}"


def unknown_name(key: str, names: list[str], data: dict[str, Any], tree: Tree) -> list[Problem]:
    """A problem when the value at `key` is none of `names` and no "module:function"."""
    path: KeyPath = tuple(key.split("."))
    value = value_at(data, path)
    if not isinstance(value, str) or value in names or ":" in value:
        return []
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"; nearest known: {near[0]}" if near else ""
    reason = f"unknown name{hint}; known: {', '.join(sorted(names))}, or module:function"
    return [Problem(tree.place(path), key, shown(value), reason)]


def rule_problems(schema: type[Section], data: Any, tree: Tree, bad: set[KeyPath]) -> list[Problem]:
    """Rules over several keys, each run by itself; one that names a key already reported is left out."""
    problems: list[Problem] = []
    for path, value in _maps(data, ()):
        section = section_at(schema, path)
        if section is None:
            continue
        rules = section.__pydantic_decorators__.model_validators.values()
        try:
            for rule in rules:
                value = rule.func(value) if rule.info.mode == "before" else value
        except ValueError:
            continue  # a wrong value, reported already
        model = _unchecked(section, value)
        for rule in rules:
            if rule.info.mode != "after":
                continue
            try:
                rule.func(model)
            except ValueError as error:
                problem = _rule_problem(str(error), path, tree, bad)
                problems += [] if problem is None else [problem]
            except (AttributeError, TypeError):
                if not bad:
                    raise
                # A missing or wrong value, reported already, keeps this rule from being judged.
    return problems


def _maps(data: Any, path: KeyPath) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Every map in the data, inner ones first."""
    if isinstance(data, dict):
        for name, value in data.items():
            yield from _maps(value, (*path, name))
        yield path, data
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _maps(value, (*path, index))


def _rule_problem(message: str, path: KeyPath, tree: Tree, bad: set[KeyPath]) -> Problem | None:
    """Place a rule's message at the first key it names; None when it names a key that is reported already."""
    named = [(*path, *word.split(".")) for word in re.findall(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", message)]
    if any(key in bad for key in named):
        return None
    written = next((key for key in named if key in tree.places and len(key) > len(path)), path)
    return Problem(tree.place(written), dotted(written), "", message)


def _unchecked(schema: type[Section], data: dict[str, Any]) -> Section:
    values: dict[str, Any] = {}
    for name, info in schema.model_fields.items():
        section = section_of(info.annotation)
        value = data.get(name, {} if section is not None and info.is_required() else None)
        if name not in data and not info.is_required():
            value = info.get_default(call_default_factory=True)
        if section is not None and isinstance(value, dict):
            value = _unchecked(section, value)
        if name in data or not info.is_required() or section is not None:
            values[name] = value
    return schema.model_construct(**values)


def value_at(data: Any, path: KeyPath) -> Any:
    """The value at `path`; None where there is none."""
    for part in path:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def _existing(loc: tuple[int | str, ...], data: Any, *, missing: bool) -> KeyPath:
    """The part of a pydantic location that exists in the data; pydantic appends the tried type of a union."""
    for length in range(1, len(loc) + 1):
        if not _has(data, loc[:length]):
            return loc[: length if missing else length - 1]
    return loc


def _has(data: Any, path: KeyPath) -> bool:
    parent = value_at(data, path[:-1])
    if isinstance(parent, dict):
        return path[-1] in parent
    return isinstance(parent, list) and path[-1] in range(len(parent))
