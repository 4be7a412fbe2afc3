"""What commands have in common: options, reading a configuration, printing a result."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from covey.config.load import LoadedConfig

File = Annotated[Path, typer.Argument(metavar="FILE", help="Configuration, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one value, for example `train.lr=2e-6`; may be repeated."),
]
ConfigDirs = Annotated[
    list[Path] | None,
    typer.Option("--config-dir", metavar="DIR", help="Where else the files of `defaults` are; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def load(
    file: Path, overrides: list[str] | None, kind: str | None, config_dirs: list[Path] | None = None
) -> LoadedConfig[Any]:
    """Read a file for `kind` of command: "train", "sft", or None for whichever the file is made for.

    Sets the variables of the file's runtime_env, before anything imports torch_npu or vLLM.
    """
    from covey.config.convert import load_any
    from covey.config.schema import Config, SftRunConfig
    from covey.rewards.base import REWARDS

    schema = {"train": Config, "sft": SftRunConfig}.get(kind or "")
    loaded = load_any(file, overrides or [], schema=schema, config_dirs=config_dirs or [], reward_names=tuple(REWARDS))
    os.environ.update(loaded.environment)
    for note in loaded.notes:
        typer.secho(f"note: {note}", err=True, fg=typer.colors.YELLOW)
    return loaded


def report(summary: dict[str, Any], as_json: bool) -> None:
    """Commands print their own progress; with --json the summary is all that stdout gets."""
    if as_json:
        print_json(summary)


def print_json(value: Any) -> None:
    """Print a value as indented JSON on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
