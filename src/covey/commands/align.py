"""`covey align`: do two devices, engines or versions compute the same numbers, and if not, where does it begin."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from covey.commands.options import File, Json, Overrides, load, print_json

align_app = typer.Typer(
    no_args_is_help=True,
    help="Compare two devices, engines or versions number by number: docs/alignment.md.",
)
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw it into a file (extra `plot`: matplotlib).")
]


@align_app.command("capture")
def capture(
    file: File,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Bundle to write.", show_default=False)],
    records: Annotated[
        Path | None, typer.Option("--records", metavar="RUN", help="Run the recorded rollouts of this run.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", help="Which step of --records; default: the last.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="ROWS", help="Run these rows with their reference answers (section data's keys)."
        ),
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option("--from", metavar="BUNDLE", help="Run exactly the ids and rewards of this bundle.")
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", min=0, help="Prompts of the set; 0: all there are.")] = 4,
    path: Annotated[
        str,
        typer.Option("--path", help="packed: the training path. padded, sequence: transformers' eager attention."),
    ] = "packed",
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32 or bfloat16, instead of model.dtype.")] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="Who samples a fresh set: native, or hf (greedy).")
    ] = "native",
    greedy: Annotated[bool, typer.Option("--greedy", help="Sample the likeliest tokens.")] = False,
    budget: Annotated[str, typer.Option("--budget", help="Largest size of the bundle.")] = "256MiB",
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Run one optimizer step on a fixed set and write down every number on the way.

    The set: `--records RUN --step N`, `--data ROWS`, `--from BUNDLE`, or else a few fresh samples, which the bundle
    keeps. On device A: `covey align capture run.yaml --out a`, on device B: `... --out b --from a`.
    """
    if step is not None and records is None:
        raise ValueError("--step belongs to --records RUN")
    chosen = [*(overrides or []), *([f"model.dtype={dtype}"] if dtype else [])]
    loaded = load(file, chosen, "train")
    from covey.tools.align import capture as tool
    from covey.tools.align.budget import parse_bytes
    from covey.tools.align.fixed_set import Source

    source = Source(records, step, data, bundle, prompts=prompts, engine=engine, greedy=greedy)
    result = tool.capture(loaded.config, out, source=source, path=path, budget_bytes=parse_bytes(budget))
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print_json(result)
        return
    rows = "all" if result["rows"] == result["of_rows"] else f"{result['rows']} of {result['of_rows']}"
    typer.echo(
        f"{result['bundle']}: {result['bytes'] / 2**20:.1f} MiB; {result['set']}: {result['prompts']} prompts, "
        f"{result['response_tokens']} response tokens; {result['steps']} steps of the model, {rows} rows"
        f"{'' if result['details'] else ', without the steps within layers (--budget)'}"
    )


@align_app.command("compare")
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Bundle to compare with.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Bundle to judge.", show_default=False)],
    profile: Annotated[str, typer.Option("--profile", help="Tolerances: fp32, bf16; docs/alignment.md.")] = "fp32",
    everything: Annotated[bool, typer.Option("--all", help="Show every comparison, not each rung's worst.")] = False,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Compare two bundles from the ids up to the moved weights; name the first divergence and its likely cause.

    Exit code 1 when they differ by more than the profile allows. `covey align compare a b --profile bf16-npu`
    """
    from covey.tools.align import compare as tool
    from covey.tools.align.report import plot_comparison, print_comparison

    result = tool.compare(a, b, profile=profile)
    if plot is not None:
        plot_comparison(result, plot)
    if as_json:
        print_json(result)
    else:
        print_comparison(result, everything=everything)
    if not result["pass"]:
        raise typer.Exit(1)


@align_app.command("curves")
def curves(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help="Run to compare with.", show_default=False)],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help="Run to judge.", show_default=False)],
    window: Annotated[int, typer.Option("--window", min=1, help="Steps that the curves are smoothed over.")] = 5,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Compare loss, reward, entropy and length of two whole runs with the published acceptance bars (2 %, 4 %).

    Exit code 1 when a curve is further off. `covey align curves runs/gpu runs/npu --plot curves.png`
    """
    from covey.tools.align import curves as tool
    from covey.tools.align.report import plot_curves, print_curves

    result = tool.curves(run_a, run_b, window=window)
    if plot is not None:
        plot_curves(result, plot)
    if as_json:
        print_json(result)
    else:
        print_curves(result)
    if not result["pass"]:
        raise typer.Exit(1)
