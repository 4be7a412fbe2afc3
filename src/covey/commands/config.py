"""`covey config`: show, explain, check and convert configurations."""

from __future__ import annotations

from typing import Annotated

import typer

from covey.commands.options import ConfigDirs, File, Json, Overrides, load, print_json

config_app = typer.Typer(no_args_is_help=True, help="Show, explain and check configurations.")


@config_app.command("show")
def config_show(file: File, overrides: Overrides = None, config_dir: ConfigDirs = None, as_json: Json = False) -> None:
    """Print the effective configuration, and after each value where it came from.

    The output is itself a valid configuration: `covey config show run.yaml > full.yaml`.
    """
    from covey.config import reference

    loaded = load(file, overrides, None, config_dir)
    if as_json:
        print_json(reference.effective_dict(loaded))
    else:
        typer.echo(reference.effective_yaml(loaded), nl=False)


@config_app.command("reference")
def config_reference(
    markdown: Annotated[bool, typer.Option("--markdown", help="As Markdown tables: docs/config.md.")] = False,
    as_json: Json = False,
) -> None:
    """Print every key with type, default, unit and meaning."""
    from covey.config import reference

    if as_json:
        print_json(reference.reference_rows())
    else:
        typer.echo(reference.reference_markdown() if markdown else reference.reference_text(), nl=False)


@config_app.command("check")
def config_check(file: File, overrides: Overrides = None, config_dir: ConfigDirs = None, as_json: Json = False) -> None:
    """Say what becomes of every key of a configuration: Covey's, MindSpeed-RL's, verl's or TRL's.

    Exit code 1 when the run cannot start. `covey config check grpo_qwen25_7b_A3.yaml --set model.path=./Qwen2.5-7B`
    """
    from covey.config.convert import check_file, report_text
    from covey.rewards.base import REWARDS

    report = check_file(file, overrides or [], config_dirs=config_dir or [], reward_names=tuple(REWARDS))
    if as_json:
        print_json(report.as_dict())
    else:
        typer.echo(report_text(report), nl=False)
    if report.verdict == "cannot":
        raise typer.Exit(1)


@config_app.command("convert")
def config_convert(file: File, overrides: Overrides = None, config_dir: ConfigDirs = None) -> None:
    """Print a MindSpeed-RL, verl or TRL configuration as Covey's, with a comment for every decision.

    `covey config convert grpo_qwen25_7b_A3.yaml > run.yaml`; TRL: the arguments of GRPOConfig as a YAML or JSON map.
    Exit code 1 when something stands in the way; it is named in the first line.
    """
    from covey.config.convert import check_file, converted_yaml
    from covey.rewards.base import REWARDS

    report = check_file(file, overrides or [], config_dirs=config_dir or [], reward_names=tuple(REWARDS))
    typer.echo(converted_yaml(report), nl=False)
    if report.verdict == "cannot":
        raise typer.Exit(1)
