"""What becomes of one key of another program's configuration: kinds of rules, and the findings they leave.

A table maps key -> rule; a rule is called with the key's value and the conversion so far, may set native keys, and
returns a finding. The tables stand in mindspeed_tables.py (MindSpeed-RL) and peers.py (verl, TRL).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# honoured: same meaning here; mapped: reached another way; verified: compared with the checkpoint, which decides;
# no effect: nothing is lost by ignoring it; not supported: something is lost, see `blocking`; unknown: no such key.
Verdict = Literal["honoured", "mapped", "verified", "no effect", "not supported", "unknown"]
KeyMap = dict[str, "Rule"]


@dataclass
class Finding:
    """The verdict on one key.

    Example: Finding("honoured", "train.steps", key="megatron_training.train_iters", value=500, place="run.yaml:23")
    """

    verdict: Verdict
    reason: str = ""
    blocking: bool = False  # the run cannot start
    differs: bool = False  # the run starts, but something of it is not as the file says
    key: str = ""  # dotted, as in the user's file
    value: Any = None
    place: str = ""  # file:line


@dataclass
class Conversion:
    """The state of converting one file: the values read, the native keys set, the findings."""

    values: dict[str, dict[str, Any]]  # section -> key -> value, dashes as underscores
    defaults: Mapping[str, Mapping[str, Any]]  # section -> key -> what the other program takes for an absent key
    native: dict[str, Any] = field(default_factory=dict)  # dotted native key -> value
    sources: dict[str, str] = field(default_factory=dict)  # dotted native key -> key of the user's file it came from
    places: dict[str, str] = field(default_factory=dict)  # dotted key of the user's file -> file:line
    findings: list[Finding] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)  # variables to set before the accelerator is imported
    reward_names: tuple[str, ...] = ()  # registered reward functions; empty: not known here
    overridden: frozenset[str] = frozenset()  # native keys that --set gives
    checkpoint: dict[str, Any] | None = None  # config.json of the model, when it is on this disk
    old_schema: bool = False  # MindSpeed-RL before mid 2025
    world_size: int = 1
    current: str = ""  # dotted key being judged

    def get(self, section: str, key: str) -> Any:
        """A key's value, or what the other program takes when it is absent."""
        value = self.values.get(section, {}).get(key)
        return self.defaults.get(section, {}).get(key) if value is None else value

    def has(self, section: str, key: str) -> bool:
        """Whether the file gives the key."""
        return self.values.get(section, {}).get(key) is not None

    def set(self, native_key: str, value: Any, source: str | None = None) -> None:
        """Set a native key; `source` is the key of the user's file, default the one being judged."""
        self.native[native_key] = value
        self.sources[native_key] = self.current if source is None else source

    def note(self, finding: Finding, key: str, value: Any = None) -> None:
        """Add a finding about `key`, given or absent."""
        finding.key, finding.value = key, value
        finding.place = self.places.get(key, "")
        self.findings.append(finding)


Rule = Callable[[Any, Conversion], Finding]


def honour(native_key: str, *, scale: Callable[[Any], Any] | None = None, why: str = "") -> Rule:
    """The key means the same as `native_key`."""

    def rule(value: Any, run: Conversion) -> Finding:
        run.set(native_key, scale(value) if scale else value)
        return Finding("honoured", f"{native_key}{'; ' + why if why else ''}")

    return rule


def mapped(native_key: str, why: str, *, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """The key becomes `native_key` after a conversion that `why` explains."""

    def rule(value: Any, run: Conversion) -> Finding:
        run.set(native_key, convert(value))
        return Finding("mapped", f"{native_key} = {run.native[native_key]}; {why}")

    return rule


def built_in(why: str) -> Rule:
    """What the key asks for is how Covey always works."""
    return lambda value, run: Finding("mapped", why)


def no_effect(why: str) -> Rule:
    """Ignoring the key loses nothing."""
    return lambda value, run: Finding("no effect", why)


def unsupported(why: str, *, off: tuple[Any, ...] = (False, None), blocking: bool = False) -> Rule:
    """Not available, unless the value is one of `off`, which asks for nothing. Equal numbers count as equal."""

    def rule(value: Any, run: Conversion) -> Finding:
        if value in off:
            return Finding("no effect", "switched off")
        return Finding("not supported", why, blocking=blocking, differs=not blocking)

    return rule


def only(expected: Any, why: str, *, blocking: bool = False) -> Rule:
    """One value is what Covey does; others are not available."""

    def rule(value: Any, run: Conversion) -> Finding:
        if value == expected:
            return Finding("honoured", why)
        return Finding("not supported", f"only {expected!r}: {why}", blocking=blocking, differs=not blocking)

    return rule


def judged_with(other: str) -> Rule:
    """The key is read together with another one, whose finding explains both."""
    return lambda value, run: Finding("honoured", f"read with {other}")


def apply_table(table: Mapping[str, Rule], given: Mapping[str, Any], prefix: str, run: Conversion) -> None:
    """Judge every given key; unknown ones get the nearest known name."""
    for key, value in given.items():
        run.current = f"{prefix}{key}"
        rule = table.get(key)
        if rule is None:
            near = difflib.get_close_matches(key, table, n=1)
            hint = f"; nearest known: {prefix}{near[0]}" if near else ""
            run.note(Finding("unknown", f"unknown key{hint}", blocking=True), run.current, value)
        elif value is None:
            run.note(Finding("no effect", "no value given"), run.current)
        else:
            run.note(judge(rule, value, run), run.current, value)


def judge(rule: Rule, value: Any, run: Conversion) -> Finding:
    """The rule's finding; a value that is not the number it should be becomes a blocking one."""
    try:
        return rule(value, run)
    except (TypeError, ValueError) as error:
        return Finding("not supported", f"cannot be read: {error}", blocking=True)


def number(value: Any) -> float:
    """A number that YAML may have read as text; ValueError when it is none."""
    if isinstance(value, bool):
        raise ValueError(f"{value} is not a number")
    return float(value)


def whole(native_key: str) -> Rule:
    """The key means the same as the whole number `native_key`."""
    return honour(native_key, scale=lambda value: int(number(value)))


def real(native_key: str) -> Rule:
    """The key means the same as the number `native_key`."""
    return honour(native_key, scale=number)
