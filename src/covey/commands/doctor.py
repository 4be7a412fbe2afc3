"""`covey doctor`: the host, a configuration, or a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covey.commands.options import Json, Overrides, load, print_json


def doctor(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Directory of a run to diagnose; without it, this host.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Check a configuration instead, as before step 1.")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Find what is wrong: with this host, with a configuration, or with a run, with cause and remedy: docs/doctor.md.

    Exit code 1 when a check fails; warnings pass. `covey doctor`, `covey doctor --config run.yaml`,
    `covey doctor runs/mine`
    """
    if run is not None and config is not None:
        raise ValueError(f"{run} and --config {config}: give a run or a configuration, not both")
    if overrides and config is None:
        raise ValueError(f"--set {overrides[0]}: has an effect only with --config")
    from covey.findings import as_json as findings_as_json
    from covey.findings import passed
    from covey.tools.doctor.report import print_findings

    view = None
    if run is not None:
        from covey.tools.doctor.run import diagnose

        view, findings = diagnose(run)
    elif config is not None:
        from covey.checks.preflight import preflight_findings

        findings = preflight_findings(load(config, overrides, "train").config)
    else:
        from covey.tools.doctor.host import Host, examine

        findings = examine(Host())
    if as_json:
        print_json(findings_as_json(findings))
    else:
        print_findings(findings, view=view)
    if not passed(findings):
        raise typer.Exit(1)
