"""The schema as a list of keys: path, type in words, default, unit and meaning of each.

Read by the loader (to say what a key expects), by `covey config reference` and by docs/config.md.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from covey.config.schema import Section
from covey.config.yaml_tree import KeyPath, dotted

# First match wins. Only keys whose name does not already say it, or whose unit a reader may mistake.
_UNITS = (
    (r"_bytes$", "bytes"),
    (r"_s$", "seconds"),
    (r"warmup_steps$", "optimizer steps"),
    (r"(steps|\.every)$", "steps"),
    (r"(_tokens|_length|max_tokens_per_micro_batch)$", "tokens"),
    (r"(train\.batch_size|mini_batch_size)$", "prompts"),
    (r"(num_samples|max_num_seqs)$", "responses"),
    (r"(_rows|data\.limit)$", "rows"),
    (r"epochs$", "passes"),
    (r"(_fraction|\.(top|min)_p)$", "share"),
    (r"top_k$", "tokens of the vocabulary"),
)


@dataclass(frozen=True)
class ConfigField:
    """One key of the schema.

    Example: ConfigField("train.lr", "number, at least 0", 1e-06, False, "", "Peak learning rate.")
    """

    key: str  # dotted; [] stands for every entry of a list
    expects: str
    default: Any  # None for required keys too
    required: bool
    unit: str
    meaning: str


def list_fields(schema: type[Section], prefix: str = "") -> Iterator[ConfigField]:
    """Every key of `schema` that holds a value, in the order of the file."""
    for name, info in schema.model_fields.items():
        key = f"{prefix}{name}"
        section = section_of(info.annotation)
        if section is not None:
            yield from list_fields(section, f"{key}{'[]' if _is_list(info.annotation) else ''}.")
        else:
            required = info.is_required()
            default = None if required else info.get_default(call_default_factory=True)
            meaning = " ".join((info.description or "").split())
            yield ConfigField(key, expects(info), default, required, unit_of(key), meaning)


def section_of(annotation: Any) -> type[Section] | None:
    """The Section in `Section`, `Section | None` or `list[Section]`; None for plain values."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (Annotated, Union, types.UnionType, list):
        found = [section_of(argument) for argument in get_args(annotation)]
        return next((section for section in found if section is not None), None)
    return None


def summary_of(schema: type[Section]) -> str:
    """The first line of a section's docstring."""
    return (schema.__doc__ or "").strip().splitlines()[0]


def unit_of(key: str) -> str:
    """Unit of a numeric key; empty when it has none."""
    return next((unit for pattern, unit in _UNITS if re.search(pattern, key)), "")


def expects(annotation: Any, constraints: tuple[Any, ...] = ()) -> str:
    """What a value must be, in words: `whole number above 0`, `one of: auto, cpu` ..."""
    if isinstance(annotation, FieldInfo):
        return expects(annotation.annotation, tuple(annotation.metadata))
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [
            part for extra in arguments[1:] for part in (extra.metadata if isinstance(extra, FieldInfo) else [extra])
        ]
        return expects(arguments[0], (*constraints, *inner))
    if origin in (Union, types.UnionType):
        return " or ".join("null" if option is type(None) else expects(option) for option in arguments)
    if origin is Literal:
        return "one of: " + ", ".join(str(option) for option in arguments)
    if origin is list:
        return f"list of {expects(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)}: {', '.join(expects(argument) for argument in arguments)}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, (dict, Section))):
        return "map"
    words = {bool: "true or false", int: "whole number", float: "number", str: "text"}
    return words.get(annotation, "any value") + _bounds(constraints)


def alternatives(annotation: Any) -> Iterator[Any]:
    """The types a value may have: unions and Annotated opened; list[...] and Literal[...] kept whole."""
    if get_origin(annotation) is Annotated:
        yield from alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from alternatives(option)
    else:
        yield annotation


def section_at(schema: type[Section], path: KeyPath) -> type[Section] | None:
    """The Section that a value at `path` belongs to; None when a plain value or an unknown key stands there."""
    annotation: Any = schema
    for part in path:
        options = list(alternatives(annotation))
        section = next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)
        container = next((o for o in options if get_origin(o) in (dict, list)), None)
        if section is not None and part in section.model_fields:
            annotation = section.model_fields[str(part)].annotation
        elif container is not None and (get_origin(container) is list) == isinstance(part, int):
            annotation = get_args(container)[-1]
        else:
            return None
    return section_of(annotation)


def expects_at(schema: type[Section], path: KeyPath) -> str:
    """What the field at `path`, or the field around it, expects; for an entry of a list, what the entry must be."""
    for length in range(len(path), 0, -1):
        section, name = section_at(schema, path[: length - 1]), path[length - 1]
        if section is not None and isinstance(name, str) and name in section.model_fields:
            info = section.model_fields[name]
            sequences = [option for option in alternatives(info.annotation) if get_origin(option) in (list, tuple)]
            return expects(get_args(sequences[0])[0]) if path[length:] and sequences else expects(info)
    return "map"


def nearest_key(schema: type[Section], path: KeyPath) -> str | None:
    """The known key an unknown `path` most likely means: spelled alike beside it, or of that name elsewhere."""
    name = str(path[-1]).replace("-", "_")
    section = section_at(schema, path[:-1]) or schema
    named = {item.key.rpartition(".")[2]: item.key for item in list_fields(schema)}
    if name in named:
        return named[name]
    here = difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.6)
    if here:
        return dotted((*path[:-1], here[0]))
    elsewhere = difflib.get_close_matches(name, named, n=1, cutoff=0.75)
    return named[elsewhere[0]] if elsewhere else None


def _is_list(annotation: Any) -> bool:
    return get_origin(annotation) is list or any(_is_list(a) for a in get_args(annotation))


def _bounds(constraints: tuple[Any, ...]) -> str:
    low = high = ""
    for limit in constraints:
        if isinstance(limit, annotated_types.Gt):
            low = f"above {limit.gt:g}"
        elif isinstance(limit, annotated_types.Ge):
            low = f"at least {limit.ge:g}"
        elif isinstance(limit, annotated_types.Lt):
            high = f"below {limit.lt:g}"
        elif isinstance(limit, annotated_types.Le):
            high = f"at most {limit.le:g}"
    both = " and ".join(text for text in (low, high) if text)
    return f" {both}" if both else ""
