"""`covey replay`: compute a recorded step again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covey.commands.options import Json, Overrides, print_json


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.", show_default=False)],
    step: Annotated[int, typer.Option("--step", min=1, help="Step to compute again.", show_default=False)],
    only_train: Annotated[
        bool, typer.Option("--only-train", help="Neither sample nor score: update from the recorded rewards.")
    ] = False,
    only_rollout: Annotated[
        bool, typer.Option("--only-rollout", help="Sample and score again; no update of the step itself.")
    ] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="Another device than the run's, as the key `device`.")
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Compute a recorded step again and name where it first differs from its record: docs/replay.md.

    Responses, rewards, log-probabilities, advantages, loss, gradient, weights; with equal bits on the same CPU, within
    tolerances elsewhere. Exit code 1 when something differs. `covey replay runs/mine --step 10`
    """
    if only_train and only_rollout:
        raise ValueError("--only-train and --only-rollout exclude each other: without both, everything is compared")
    from covey.tools import replay as tool
    from covey.tools.replay_compare import print_report

    result = tool.replay(run, step, rollout=not only_train, update=not only_rollout, device=device, overrides=overrides)
    if as_json:
        print_json(result)
    else:
        print_report(result)
    if not result["pass"]:
        raise typer.Exit(1)
