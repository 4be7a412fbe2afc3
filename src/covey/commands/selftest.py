"""`covey selftest`: first contact with a device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covey.commands.options import Json, print_json


def selftest(
    device: Annotated[str, typer.Option("--device", help="The kind of device, as `device` in a YAML file.")] = "auto",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the bundle goes.")] = Path("runs/selftest"),
    as_json: Json = False,
) -> None:
    """Find out in minutes whether this device computes what the CPU computes, and how fast it is.

    Operations, attention, sampling, repeatability, exchanges between ranks (under torchrun), two steps of GRPO that
    are replayed on the CPU, speed. The bundle in DIR is for comparing and for asking. Exit code 1 when a check fails.
    """
    from covey import findings as found
    from covey.tools.selftest import run as tool

    def show(finding: found.Finding) -> None:
        typer.echo(f"{finding.severity:<8} {finding.rule:<26} {finding.found}")
        if finding.severity in ("warning", "failure"):
            typer.echo(f"{'':8} expected {finding.expected}; {finding.why}. {finding.fix}")

    if not as_json:
        typer.echo(tool.versions_line())
    findings = tool.run(out, kind=device, on_finding=None if as_json else show)
    if as_json:
        print_json(found.as_json(findings))
    else:
        typer.echo(f"The bundle is {out}.")
    if not found.passed(findings):
        raise typer.Exit(1)
