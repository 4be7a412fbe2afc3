"""Configurations of other programs: recognised, judged key by key, converted to Covey's own.

`load_any` is what `covey train` uses: a native file, MindSpeed-RL YAML of any age, a verl YAML or list of overrides, or
TRL's GRPOConfig as a map. `--set` takes the file's own keys and, before all, Covey's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from covey.config.load import LoadedConfig, apply_overrides, schema_of, validate_tree
from covey.config.mindspeed_read import convert_mindspeed, is_mindspeed
from covey.config.peers import convert_peer, peer_of, read_override_list
from covey.config.reference import yaml_scalar
from covey.config.rules import Conversion, Finding
from covey.config.schema import Config, Section
from covey.config.yaml_tree import ConfigError, KeyPath, Problem, Tree, parse_path, read_tree, shown

Dialect = Literal["covey", "mindspeed-rl", "verl", "trl"]
_TITLES = {"covey": "Covey", "mindspeed-rl": "MindSpeed-RL", "verl": "verl", "trl": "TRL GRPOConfig"}


@dataclass
class Report:
    """What became of every key of a file, and whether the run can start."""

    source: str
    dialect: Dialect
    findings: list[Finding]
    problems: list[Problem] = field(default_factory=list)  # of the native configuration that came out
    loaded: LoadedConfig[Any] | None = None  # None when it cannot run
    conversion: Conversion | None = None  # None for native files

    @property
    def verdict(self) -> Literal["runs", "differs", "cannot"]:
        """`differs`: it runs, but something is not as the file says."""
        if self.loaded is None:
            return "cannot"
        return "differs" if any(finding.differs for finding in self.findings) else "runs"

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        if self.verdict == "runs":
            return "runs"
        if self.verdict == "differs":
            count = sum(finding.differs for finding in self.findings)
            return f"runs with {count} difference{'s' if count > 1 else ''}"
        return "cannot run: " + "; ".join(self.obstacles())

    def obstacles(self) -> list[str]:
        """What stands in the way, one phrase each."""
        blocking = [f for f in self.findings if f.blocking]
        found = [f"{f.key}{'' if f.value is None else f' = {shown(f.value)}'}: {f.reason}" for f in blocking]
        return found + [f"{p.key}: {p.reason}" if not p.reason.startswith(p.key) else p.reason for p in self.problems]

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            "verdict": self.verdict,
            "sentence": self.sentence,
            "format": self.dialect,
            "keys": [
                {
                    "key": f.key,
                    "value": f.value,
                    "verdict": f.verdict,
                    "reason": f.reason,
                    "line": line_of(f.place),
                    "file": f.place.rpartition(":")[0] or f.place or None,
                    "differs": f.differs,
                    "blocking": f.blocking,
                }
                for f in self.findings
            ],
            "problems": [vars(problem) for problem in self.problems],
        }


def load_any(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    schema: type[Section] | None = None,
    config_dirs: Sequence[Path] = (),
    reward_names: Sequence[str] = (),
) -> LoadedConfig[Any]:
    """Load a file of any known format; `schema` None: whichever the file is made for. Raises ConfigError.

    `reward_names`: the registered reward functions, so that a verifier that does not exist is found now.
    """
    tree, native = _read(path, overrides)
    dialect = dialect_of(tree.data)
    if dialect == "covey" or schema not in (None, Config):
        apply_overrides(tree, overrides if dialect == "covey" else [])
        return validate_tree(tree, schema or schema_of(tree))
    report = _convert(tree, dialect, native, config_dirs, tuple(reward_names))
    if report.loaded is None:
        blocking = [f for f in report.findings if f.blocking]
        problems = [Problem(f.place or report.source, f.key, shown(f.value), f.reason) for f in blocking]
        raise ConfigError(report.source, [*problems, *report.problems])
    return report.loaded


def check_file(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    config_dirs: Sequence[Path] = (),
    reward_names: Sequence[str] = (),
) -> Report:
    """Judge a file without raising for what is wrong in it; ConfigError only when it cannot be read."""
    tree, native = _read(path, overrides)
    dialect = dialect_of(tree.data)
    if dialect != "covey":
        return _convert(tree, dialect, native, config_dirs, tuple(reward_names))
    apply_overrides(tree, overrides)
    try:
        loaded = validate_tree(tree, schema_of(tree))
    except ConfigError as error:
        return Report(tree.source, dialect, [], problems=error.problems)
    values = _flat(loaded.config)
    findings = [
        Finding("honoured", "", key=key, value=values.get(key), place=place)
        for key, place in loaded.origins.items()
        if place != "default"
    ]
    return Report(tree.source, dialect, findings, loaded=loaded)


def dialect_of(data: Any) -> Dialect:
    """Which program's configuration this is; Covey's own when no other is recognised."""
    if is_mindspeed(data):
        return "mindspeed-rl"
    return peer_of(data) or "covey"


def converted_yaml(report: Report) -> str:
    """The native YAML; every value with the key it came from, every other key with what became of it."""
    run = report.conversion
    if run is None:
        raise ValueError(f"{report.source} is Covey's own format already; covey config show prints all of it")
    lines = [f"# Converted from {report.source} ({_TITLES[report.dialect]}). Verdict: {report.sentence}"]
    _write(_nested(run.native), "", 0, run, lines)
    for title, verdicts in (
        ("Not supported", ("not supported", "unknown")),
        ("Reached another way", ("mapped",)),
        ("Taken from the checkpoint", ("verified",)),
        ("Without effect", ("no effect",)),
    ):
        chosen = [finding for finding in report.findings if finding.verdict in verdicts]
        lines += ["", f"# {title}:"] if chosen else []
        lines += [f"#   {f.key}{'' if f.value is None else ' = ' + shown(f.value)}: {f.reason}" for f in chosen]
    return "\n".join(lines) + "\n"


def report_text(report: Report) -> str:
    """The table of all keys and the verdict."""
    lines = [f"{report.source}: {_TITLES[report.dialect]}"]
    file = ""
    for finding in report.findings:
        line = line_of(finding.place)
        where = finding.place.rpartition(":")[0] if line else (finding.place or file)
        if where != file:
            file = where
            lines += ["", f"{file}:"]
        value = "" if finding.value is None else f" = {shown(finding.value)}"
        reason = f": {finding.reason}" if finding.reason else ""
        lines += [f"{line or '':>5}  {finding.key}{value}", f"         {finding.verdict}{reason}"]
    counts = Counter(finding.verdict for finding in report.findings)
    if counts:
        lines += ["", ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())]
    lines += ["", report.sentence]
    return "\n".join(lines) + "\n"


def line_of(place: str) -> int | None:
    """The line in `file:line`."""
    number = place.rpartition(":")[2]
    return int(number) if number.isdigit() else None


def _read(path: str | Path, overrides: Sequence[str]) -> tuple[Tree, list[str]]:
    """The file with the overrides of its own keys; and the overrides of Covey's keys, for formats not Covey's."""
    tree = read_override_list(path) or read_tree(path)
    if dialect_of(tree.data) == "covey":
        return tree, []
    native = [
        item for item in overrides if (parse_path(item.partition("=")[0].strip()) or ("",))[0] in Config.model_fields
    ]
    apply_overrides(tree, [item for item in overrides if item not in native])
    return tree, native


def _convert(
    tree: Tree, dialect: Dialect, native: list[str], config_dirs: Sequence[Path], reward_names: tuple[str, ...]
) -> Report:
    overridden = frozenset(item.partition("=")[0].strip() for item in native)
    if dialect == "mindspeed-rl":
        run = convert_mindspeed(tree, config_dirs=config_dirs, overridden=overridden, reward_names=reward_names)
    else:
        run = convert_peer(tree, dialect)
    run.native.setdefault("output_dir", f"runs/{Path(tree.source).stem}")
    converted = Tree(tree.source, _nested(run.native), problems=list(tree.problems))
    for key, source in run.sources.items():
        path: KeyPath = tuple(key.split("."))
        converted.places[path] = run.places.get(source, source)
    apply_overrides(converted, native)
    report = Report(tree.source, dialect, run.findings, conversion=run)
    try:
        loaded = validate_tree(converted, Config)
    except ConfigError as error:
        blocked = {key for f in run.findings if f.blocking for key in ("reward", "rollout.num_samples")}
        report.problems = [p for p in error.problems if p.key not in blocked]
        return report
    if not any(finding.blocking for finding in run.findings):
        notes = [f"{f.place or f.key}: {f.key}: {f.reason}" for f in run.findings if f.differs]
        report.loaded = LoadedConfig(
            loaded.config,
            loaded.origins,
            loaded.source,
            notes,
            dialect=dialect,
            environment=loaded.environment | run.environment,
        )
    return report


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as maps, in the order of the schema's sections."""
    result: dict[str, Any] = {}
    order = list(Config.model_fields)
    for key, value in sorted(flat.items(), key=lambda item: order.index(item[0].partition(".")[0])):
        *sections, name = key.split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
        target[name] = value
    return result


def _flat(config: Section, prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, Section):
            values |= _flat(value, f"{prefix}{name}.")
        else:
            dumped = config.model_dump(mode="json", include={name})[name]
            values[f"{prefix}{name}"] = dumped
            if isinstance(dumped, list):
                entries = [(i, entry) for i, entry in enumerate(dumped) if isinstance(entry, dict)]
                values |= {f"{prefix}{name}[{i}].{key}": item for i, entry in entries for key, item in entry.items()}
    return values


def _write(data: dict[str, Any], prefix: str, depth: int, run: Conversion, lines: list[str]) -> None:
    for name, value in data.items():
        key, indent = f"{prefix}{name}", "  " * depth
        if isinstance(value, dict) and key not in run.native:
            lines.append(f"{indent}{name}:")
            _write(value, f"{key}.", depth + 1, run, lines)
            continue
        source = run.sources.get(key, "")
        line = line_of(run.places.get(source, ""))
        text = f"{indent}{name}: {yaml_scalar(value)}"
        lines.append(f"{text:<48}  # {source}{f' (line {line})' if line else ''}" if source else text)
