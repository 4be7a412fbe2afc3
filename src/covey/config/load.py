"""A YAML file and command-line overrides -> a validated configuration that knows where each value came from.

All problems of a file are reported at once: unknown and duplicate keys, missing keys, wrong values, broken rules.
Relative paths inside a file stay relative to the working directory, as on a command line.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError

from covey.config.fields import alternatives, expects, expects_at, nearest_key, section_at, section_of, summary_of
from covey.config.presets import apply_preset
from covey.config.schema import Config, Section, SftRunConfig
from covey.config.yaml_tree import ConfigError, KeyPath, Problem, Tree, apply_override, dotted, read_tree, shown

AnyConfig = TypeVar("AnyConfig", bound=Section)


@dataclass(frozen=True)
class LoadedConfig(Generic[AnyConfig]):
    """A configuration and its history.

    Example: config.train.lr == 1e-6, origins["train.lr"] == "run.yaml:7", source == "run.yaml"
    """

    config: AnyConfig
    origins: dict[str, str]  # dotted key of every value -> "file:line", "--set", "preset NAME" or "default"
    source: str
    notes: list[str] = field(default_factory=list)  # what the user should know although the configuration is valid
    dialect: str = "covey"  # whose file it was: covey, mindspeed-rl, verl, trl
    environment: dict[str, str] = field(default_factory=dict)  # to set before torch_npu or vLLM is imported


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    schema: type[AnyConfig] = Config,
    *,
    choices: Mapping[str, Iterable[str]] | None = None,
) -> LoadedConfig[AnyConfig]:
    """Read `path`, apply `a.b=value` overrides, validate.

    `choices` maps dotted keys to known names, for fields whose names live in registries (`algorithm.loss`); a name
    with a colon is a path to the user's own function and passes. Raises ConfigError with every problem found.
    """
    return validate_tree(load_tree(path, overrides), schema, choices=choices)


def load_tree(path: str | Path, overrides: Sequence[str] = ()) -> Tree:
    """Read `path` and apply `a.b=value` overrides, without knowing what the keys mean."""
    tree = read_tree(path)
    apply_overrides(tree, overrides)
    return tree


def apply_overrides(tree: Tree, overrides: Sequence[str]) -> None:
    """Put `a.b=value` overrides over the tree, in their order."""
    for override in overrides:
        apply_override(tree, override)


def validate_tree(
    tree: Tree, schema: type[AnyConfig], *, choices: Mapping[str, Iterable[str]] | None = None
) -> LoadedConfig[AnyConfig]:
    """Validate a tree against `schema`; raises ConfigError with every problem found."""
    if tree.data is None:
        tree.data = {}
    if not isinstance(tree.data, dict):
        reason = f"is not a map of sections but {shown(tree.data)}; start with `model:` and its keys"
        raise ConfigError(tree.source, [*tree.problems, Problem(tree.source, "", "", reason)])
    apply_preset(tree)
    problems = list(tree.problems)
    bad: set[KeyPath] = set()
    data = _Fit(tree, problems, bad).value(schema, tree.data, ())
    config: AnyConfig | None = None
    try:
        config = schema.model_validate(data)
    except ValidationError as error:
        problems += _field_problems(error, schema, tree, data, bad)
    problems += _rule_problems(schema, data, tree, bad)
    for key, names in (choices or {}).items():
        problems += _unknown_name(key, list(names), data, tree)
    if problems or config is None:
        raise ConfigError(tree.source, sorted(problems, key=_by_line))
    return LoadedConfig(config, dict(_origins(config, (), tree)), tree.source)


def schema_of(tree: Tree) -> type[Section]:
    """SftRunConfig for a file with an `sft` section, Config for all others."""
    return SftRunConfig if isinstance(tree.data, dict) and "sft" in tree.data else Config


@dataclass
class _Fit:
    """Reads scalars as their field wants them: names as written, numbers from text, an empty section as a map."""

    tree: Tree
    problems: list[Problem]
    bad: set[KeyPath]

    def value(self, annotation: Any, value: Any, path: KeyPath) -> Any:
        options = list(alternatives(annotation))
        section = next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)
        if section is not None:
            if value is None and NoneType not in options:
                return {}
            return self.section(section, value, path) if isinstance(value, dict) else value
        if isinstance(value, list):
            item = next((get_args(o)[0] for o in options if get_origin(o) in (list, tuple)), Any)
            return [self.value(item, entry, (*path, index)) for index, entry in enumerate(value)]
        if isinstance(value, dict):
            item = next((get_args(o)[1] for o in options if get_origin(o) is dict), Any)
            return {name: self.value(item, entry, (*path, name)) for name, entry in value.items()}
        if str in options or any(get_origin(o) is Literal for o in options):
            scalar = isinstance(value, (bool, int, float)) and not {bool, int, float} & set(options)
            return self.tree.texts.get(path, value) if scalar else value
        if (int in options or float in options) and bool not in options:
            return self.number(value, path, whole=float not in options)
        return value

    def section(self, section: type[Section], value: dict[str, Any], path: KeyPath) -> dict[str, Any]:
        fields = section.model_fields
        return {
            name: self.value(fields[name].annotation, item, (*path, name)) if name in fields else item
            for name, item in value.items()
        }

    def number(self, value: Any, path: KeyPath, *, whole: bool) -> Any:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                return value
        if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            wanted = "a whole number" if whole else "a finite number"
            self.problems.append(Problem(self.tree.place(path), dotted(path), shown(value), f"needs {wanted}"))
            self.bad.add(path)
        return int(value) if whole and isinstance(value, float) and value.is_integer() else value


def _field_problems(
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
            problems.append(Problem(place, key, shown(_get(data, path)), _unknown_key(schema, path)))
        elif item["type"] == "value_error":
            problems.append(Problem(place, key, shown(_get(data, path)), item["msg"].removeprefix("Value error, ")))
        else:
            problems.append(Problem(place, key, shown(_get(data, path)), f"needs {expects_at(schema, path)}"))
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


def _unknown_name(key: str, names: list[str], data: dict[str, Any], tree: Tree) -> list[Problem]:
    path: KeyPath = tuple(key.split("."))
    value = _get(data, path)
    if not isinstance(value, str) or value in names or ":" in value:
        return []
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"; nearest known: {near[0]}" if near else ""
    reason = f"unknown name{hint}; known: {', '.join(sorted(names))}, or module:function"
    return [Problem(tree.place(path), key, shown(value), reason)]


def _rule_problems(schema: type[Section], data: Any, tree: Tree, bad: set[KeyPath]) -> list[Problem]:
    """Rules over several keys, each run by itself; one that names a key already reported is left out."""
    problems: list[Problem] = []
    for path, value in _maps(data, ()):
        section = section_at(schema, path)
        if section is None:
            continue
        model = _unchecked(section, value)
        for rule in section.__pydantic_decorators__.model_validators.values():
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


def _origins(config: Section, path: KeyPath, tree: Tree) -> Iterator[tuple[str, str]]:
    for name in type(config).model_fields:
        value, below = getattr(config, name), (*path, name)
        if isinstance(value, Section):
            yield from _origins(value, below, tree)
        elif isinstance(value, list) and value and all(isinstance(entry, Section) for entry in value):
            for index, entry in enumerate(value):
                yield from _origins(entry, (*below, index), tree)
        else:
            bare = path in tree.places and not isinstance(_get(tree.data, path), dict)  # `- math` for {name: math}
            place = tree.places[path] if bare and name == next(iter(type(config).model_fields)) else "default"
            yield dotted(below), tree.places.get(below, place)


def _existing(loc: tuple[int | str, ...], data: Any, *, missing: bool) -> KeyPath:
    """The part of a pydantic location that exists in the data; pydantic appends the tried type of a union."""
    for length in range(1, len(loc) + 1):
        if not _has(data, loc[:length]):
            return loc[: length if missing else length - 1]
    return loc


def _has(data: Any, path: KeyPath) -> bool:
    parent = _get(data, path[:-1])
    if isinstance(parent, dict):
        return path[-1] in parent
    return isinstance(parent, list) and path[-1] in range(len(parent))


def _get(data: Any, path: KeyPath) -> Any:
    """The value at `path`; None where there is none."""
    for part in path:
        if isinstance(data, dict):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def _by_line(problem: Problem) -> tuple[str, int]:
    name, _, line = problem.place.rpartition(":")
    return (name, int(line)) if line.isdigit() else (problem.place, 0)
