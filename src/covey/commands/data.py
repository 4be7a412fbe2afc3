"""`covey data` and `covey reward`: look at training data, and score responses without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from covey.commands.options import File, Json, Overrides, print_json, report

data_app = typer.Typer(no_args_is_help=True, help="Look at training data.")
reward_app = typer.Typer(no_args_is_help=True, help="Debug rewards.")


@data_app.command("stats")
def data_stats(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Output of covey preprocess.", show_default=False)],
    max_prompt_length: Annotated[
        int | None,
        typer.Option("--max-prompt-length", min=1, help="Also the share of prompts longer than this, tokens."),
    ] = None,
    max_response_length: Annotated[
        int | None, typer.Option("--max-response-length", min=1, help="The same for reference responses.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print row counts and length percentiles of preprocessed data, and what limits would cut."""
    from covey.data import stats as tool

    limits = {"max_prompt_length": max_prompt_length, "max_response_length": max_response_length}
    report(tool.run(file, **limits, quiet=as_json), as_json)


@reward_app.command("try")
def reward_try(
    file: File,
    data: Annotated[
        Path, typer.Option("--data", metavar="ROWS", help="Rows as JSON lines, as in training.", show_default=False)
    ],
    responses: Annotated[
        Path | None,
        typer.Option("--responses", metavar="R", help='JSON lines of {"response": ...} or {"responses": [...]}.'),
    ] = None,
    overrides: Overrides = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Rows to score; 0: all.")] = 20,
    as_json: Json = False,
) -> None:
    """Score responses without a model, and show the parts of each score.

    Without responses every row is tried with its own reference answer and with an empty text. Exit code 1 when a
    reward failed. `covey reward try run.yaml --data rows.jsonl --responses r.jsonl`
    """
    from covey.rewards import try_out as tool

    result = tool.run(file, data, responses, overrides=overrides, limit=limit)
    if as_json:
        print_json(result)
    else:
        typer.echo(tool.report_text(result), nl=False)
    if result["counts"]["errors"] or result["counts"]["timeouts"]:
        raise typer.Exit(1)
