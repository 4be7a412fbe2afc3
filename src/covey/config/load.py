"""A YAML file and command-line overrides -> a validated configuration that knows where each value came from.

All problems of a file are reported at once: unknown and duplicate keys, missing keys, wrong values, broken rules.
Relative paths inside a file stay relative to the working directory, as on a command line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import ValidationError

from covey.config.environment import Environment, environment_of
from covey.config.fields import alternatives
from covey.config.presets import apply_preset
from covey.config.problems import field_problems, rule_problems, unknown_name, value_at
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
    broken_rule = ""
    try:
        config = schema.model_validate(data)
    except ValidationError as error:
        broken_rule = error.errors()[0]["msg"].removeprefix("Value error, ")
        problems += field_problems(error, schema, tree, data, bad)
    problems += rule_problems(schema, data, tree, bad)
    for key, names in (choices or {}).items():
        problems += unknown_name(key, list(names), data, tree)
    if config is None and not problems:
        problems.append(Problem(tree.source, "", "", broken_rule))
    if problems or config is None:
        raise ConfigError(tree.source, sorted(problems, key=_by_line))
    environment = _environment(config, tree)
    notes = [
        f"the shell has {name}={os.environ[name]}, which stays; the file wants {v}" for name, v in environment.kept
    ]
    return LoadedConfig(config, dict(_origins(config, (), tree)), tree.source, notes, environment=environment.variables)


def _environment(config: Any, tree: Tree) -> Environment:
    if not isinstance(config, Config | SftRunConfig):
        return Environment()
    try:
        return environment_of(config)
    except ValueError as error:
        raise ConfigError(tree.source, [Problem(tree.source, "environment", "", str(error))]) from error


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


def _origins(config: Section, path: KeyPath, tree: Tree) -> Iterator[tuple[str, str]]:
    for name in type(config).model_fields:
        value, below = getattr(config, name), (*path, name)
        derived = not type(config).model_fields[name].is_required() and value != _default(type(config), name)
        if isinstance(value, Section):
            yield from _origins(value, below, tree)
        elif isinstance(value, list) and value and all(isinstance(entry, Section) for entry in value):
            for index, entry in enumerate(value):
                yield from _origins(entry, (*below, index), tree)
        else:
            bare = path in tree.places and not isinstance(value_at(tree.data, path), dict)  # `- math` for {name: math}
            place = "derived" if derived else "default"  # derived: set by a rule of the schema, such as a preset
            if bare and name == next(iter(type(config).model_fields)):
                place = tree.places[path]
            yield dotted(below), tree.places.get(below, place)


def _default(schema: type[Section], name: str) -> Any:
    return schema.model_fields[name].get_default(call_default_factory=True)


def _by_line(problem: Problem) -> tuple[str, int]:
    name, _, line = problem.place.rpartition(":")
    return (name, int(line)) if line.isdigit() else (problem.place, 0)
