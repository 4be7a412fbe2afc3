"""The command line. Commands import what they need when they run, so that `covey --help` answers at once.

Exit codes of every command: 0 done, 1 a check failed, 2 usage or configuration error, 130 interrupted. Errors a user
can fix (ValueError, OSError) are one paragraph on stderr; COVEY_DEBUG=1 shows the traceback.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from covey.commands.align import align_app
from covey.commands.config import config_app
from covey.commands.data import data_app, reward_app
from covey.commands.doctor import doctor
from covey.commands.options import ConfigDirs, File, Json, Overrides, load, print_json, report
from covey.commands.plan import plan
from covey.commands.replay import replay
from covey.commands.selftest import selftest

if TYPE_CHECKING:
    from covey.config.load import LoadedConfig

app = typer.Typer(
    name="covey",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train language models with group-relative policy optimisation, on CPU, CUDA and Ascend NPU.",
    epilog="Start with `covey quickstart`. Exit codes: 0 done, 1 a check failed, 2 usage or configuration error, "
    "130 interrupted.",
)
app.add_typer(config_app, name="config")
app.add_typer(align_app, name="align")
app.add_typer(data_app, name="data")
app.add_typer(reward_app, name="reward")
app.command()(plan)
app.command()(replay)
app.command()(doctor)
app.command()(selftest)


def main() -> None:
    """Run the command line and exit with its code."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("covey").setLevel(logging.INFO)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError) as error:
        if os.environ.get("COVEY_DEBUG") == "1":
            raise
        _print_error(error)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def covey(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Options before a command."""
    if version:
        from covey import __version__

        typer.echo(f"covey {__version__}")
        raise typer.Exit


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option("--out", help="Directory of the run.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option("--seed", help="Seed of model, data and training.")] = 0,
    as_json: Json = False,
) -> None:
    """Make a small model, teach it by GRPO on this machine, and show that it learned. Needs no network."""
    from covey.tools import quickstart as tool

    report(tool.run(out, seed, json=as_json), as_json)


@app.command()
def preprocess(file: File, overrides: Overrides = None, as_json: Json = False) -> None:
    """Turn raw rows into training rows, as MindSpeed-RL's preprocessing does, and report what was dropped and why.

    `covey preprocess deepscaler.yaml --set workers=8`; the YAML is MindSpeed-RL's dataset file.
    """
    from covey.data import preprocess as tool

    report(tool.run(file, overrides or [], quiet=as_json), as_json)


@app.command()
def train(
    file: File,
    overrides: Overrides = None,
    config_dir: ConfigDirs = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in output_dir.")] = False,
    resume_from: Annotated[
        Path | None, typer.Option("--resume-from", metavar="DIR", help="Continue from this checkpoint.")
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and estimate memory; read no weights, train nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train with GRPO.

    One device: `covey train run.yaml --set train.steps=20`. Several: `covey launch --nproc 8 run.yaml`. Ctrl-C
    writes a checkpoint and exits with 130; `--resume` goes on from it.
    """
    loaded, checkpoint = load(file, overrides, "train", config_dir), _resume(resume, resume_from)
    if dry:
        _dry_run(loaded, resume=checkpoint is not None, as_json=as_json)
        return
    from covey import trainer as tool

    summary = tool.train(loaded, resume=checkpoint, quiet=as_json)
    report(summary, as_json)
    if summary["interrupted"]:
        raise typer.Exit(130)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def launch(
    context: typer.Context,
    file: File,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Processes: one for each device of this host.")],
    command: Annotated[str, typer.Option("--command", help="What they run: train, sft or evaluate.")] = "train",
    max_restarts: Annotated[int, typer.Option("--max-restarts", min=0, help="Starts again after a failure.")] = 0,
) -> None:
    """Train on several devices of this host. Further options go to the command.

    `covey launch --nproc 8 run.yaml --set parallel.tp=2`; over several hosts: `torchrun ... -m covey train run.yaml`
    """
    from covey.tools import launch as tool

    raise typer.Exit(tool.run(nproc, [command, str(file), *context.args], max_restarts=max_restarts))


@app.command()
def sft(file: File, overrides: Overrides = None, as_json: Json = False) -> None:
    """Train on demonstrations: the cold start before GRPO.

    `covey sft sft.yaml` writes the model to `OUTPUT/model`; go on with `covey train run.yaml --set
    model.path=OUTPUT/model`.
    """
    loaded = load(file, overrides, "sft")
    from covey import sft as tool

    report(tool.run(loaded), as_json)


@app.command()
def evaluate(
    file: File,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR", help="Evaluate this model instead of the configuration's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Score a model on held-out rows with the training rewards: mean reward, pass@1, pass@k.

    `covey evaluate run.yaml --model runs/mine/model --set evaluation.num_samples=4`
    """
    loaded = load(file, overrides, "train")
    from covey import evaluate as tool

    report(tool.run(loaded, model=model), as_json)


@app.command()
def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run, or one of its checkpoints.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory to write.", show_default=False)],
    dtype: Annotated[
        str, typer.Option("--dtype", help="Numbers of the written weights: auto, float32 or bfloat16.")
    ] = "auto",
    adapter: Annotated[
        bool, typer.Option("--adapter/--merge", help="Of a run with LoRA: its adapter alone, or merged into its model.")
    ] = False,
    base: Annotated[
        str | None, typer.Option("--base", metavar="DIR", help="Where the model is now that an adapter was trained on.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face model, whatever number of devices it was made on.

    `covey export runs/mine --out models/mine`
    """
    from covey.tools import export as tool

    report(tool.run(source, out, dtype=dtype, adapter=adapter, base=base), as_json)


@app.command()
def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run.", show_default=False)],
    step: Annotated[int | None, typer.Option("--step", help="Step to show; default: the last recorded.")] = None,
    prompt: Annotated[
        int | None, typer.Option("--prompt", help="Only this prompt of the step, with whole texts.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Prompts to show; 0: all.")] = 4,
    as_json: Json = False,
) -> None:
    """Show what a step sampled: each prompt with its responses, rewards and advantages side by side.

    `covey show runs/mine --step 10`
    """
    from covey.tools import show as tool

    tool.show(run, step, json=as_json, prompt=prompt, limit=limit)


def _dry_run(loaded: LoadedConfig[Any], *, resume: bool, as_json: bool) -> None:
    from covey.tools.dry_run import dry_run, print_report

    result = dry_run(loaded, resume=resume)
    if not as_json:
        print_report(result)
    elif os.environ.get("RANK", "0") == "0":
        print_json(result)
    if not result["ok"]:
        raise typer.Exit(2)


def _resume(last: bool, directory: Path | None) -> bool | str | None:
    if directory is not None and not directory.is_dir():
        raise ValueError(f"--resume-from {directory}: no such directory")
    if directory is None and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return "auto"  # torchrun started the processes again after a failure
    return str(directory) if directory is not None else (last or None)


def _print_error(error: ValueError | OSError) -> None:
    text = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    typer.secho(f"error: {text or type(error).__name__}", fg=typer.colors.RED, err=True)
