"""Tables for a terminal and plots for a file: what compare and curves found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_FLAG = {True: "[green]pass[/green]", False: "[red]FAIL[/red]"}


def print_comparison(result: dict[str, Any], *, everything: bool = False, console: Console | None = None) -> None:
    """The ladder: of every rung its worst comparison and its first failure; `everything`: every comparison."""
    console = console or Console()
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # 80 columns have room for all
    for column, width in (("rung", 10), ("step", 22)):
        table.add_column(column, no_wrap=True, min_width=width, max_width=None if everything else width)
    for column, width in (("", 4), ("cosine", 7), ("max abs", 7), ("rel. L2", 7), ("|B|/|A|", 7), ("allowed", 7)):
        table.add_column(column, no_wrap=True, justify="right", min_width=width)
    rows = _shown(result["rungs"], everything)
    for row in rows:
        numbers = [_number(row[key], form) for key, form in _FORMS.items()]
        table.add_row(row["rung"], escape(row["name"]), _FLAG[row["pass"]], *numbers)
    console.print(table)
    failed = sum(not row["pass"] for row in result["rungs"])
    number, first = len(result["rungs"]), result["first_divergence"]
    if len(rows) < number:
        console.print(f"{len(rows)} of {number} comparisons shown; --all shows the rest")
    if first is None:
        console.print(f"[green]A and B agree[/green] by profile {result['profile']} in {number} comparisons")
        return
    console.print(f"{failed} of {number} comparisons fail by profile {result['profile']}")
    console.print(f"[red]First divergence[/red]: {first['rung']}, {escape(first['name'])}", soft_wrap=True)
    console.print(f"Likely cause: {escape(first['cause'])}", soft_wrap=True)


def print_curves(result: dict[str, Any], *, console: Console | None = None) -> None:
    """One line a curve."""
    console = console or Console()
    table = Table("curve", "metric", "", "error", "allowed", "kind", "mean A", "mean B", "mean B - A", "steps")
    for row in result["curves"]:
        form = ".2%" if row["kind"] == "relative" else ".3g"
        error, allowed = (format(row[key], form) for key in ("error", "allowed"))
        means = [f"{row[key]:.4g}" for key in ("mean_a", "mean_b", "bias")]
        table.add_row(
            row["curve"], row["metric"], _FLAG[row["pass"]], error, allowed, row["kind"], *means, str(row["steps"])
        )
    console.print(table)


def plot_comparison(result: dict[str, Any], file: Path) -> None:
    """Relative L2 of every comparison along the ladder, over what is allowed."""
    rows = [row for row in result["rungs"] if row["relative_l2"] is not None]
    figure, axes = _figure(1)
    places = range(len(rows))
    smallest = min((row["relative_l2"] for row in rows if row["relative_l2"] > 0), default=1e-9)
    colors = ["tab:blue" if row["pass"] else "tab:red" for row in rows]
    axes[0].scatter(places, [max(row["relative_l2"], smallest / 3) for row in rows], c=colors, s=12)
    axes[0].plot(places, [row["tolerance"] for row in rows], color="gray", linewidth=1, label="allowed")
    starts = [i for i, row in enumerate(rows) if i == 0 or rows[i - 1]["rung"] != row["rung"]]
    axes[0].set_xticks(starts, [rows[i]["rung"] for i in starts], rotation=60, ha="right", fontsize=8)
    axes[0].set_yscale("log")
    axes[0].set_ylabel("relative L2 of B - A")
    axes[0].set_title(f"profile {result['profile']}: {'pass' if result['pass'] else 'FAIL'}")
    axes[0].legend()
    figure.savefig(file)


def plot_curves(result: dict[str, Any], file: Path) -> None:
    """Both runs' curves, one plot below the other."""
    figure, axes = _figure(len(result["series"]))
    verdicts = {row["curve"]: row for row in result["curves"]}
    for axis, (name, series) in zip(axes, result["series"].items(), strict=True):
        axis.plot(series["step"], series["a"], label="A")
        axis.plot(series["step"], series["b"], label="B", linestyle="--")
        row = verdicts[name]
        axis.set_ylabel(name)
        title = f"{row['metric']}: {row['kind']} error {row['error']:.3g}, allowed {row['allowed']:g}"
        axis.set_title(title, fontsize=9)
    axes[0].legend()
    axes[-1].set_xlabel("step")
    figure.savefig(file)


_FORMS = {"cosine": ".5f", "max_abs": ".1e", "relative_l2": ".1e", "norm_ratio": ".4f", "tolerance": ".0e"}


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _shown(rows: Sequence[dict[str, Any]], everything: bool) -> list[dict[str, Any]]:
    if everything:
        return list(rows)
    worst: dict[str, dict[str, Any]] = {}
    for row in rows:
        share = (row["relative_l2"] or 0.0) / row["tolerance"] if row["tolerance"] else 0.0
        if row["rung"] not in worst or share > worst[row["rung"]]["share"]:
            worst[row["rung"]] = row | {"share": share}
    names = {(row["rung"], row["name"]) for row in worst.values()}
    failed: dict[str, str] = {}
    for row in rows:
        if not row["pass"]:
            failed.setdefault(row["rung"], row["name"])
    return [row for row in rows if (row["rung"], row["name"]) in names or failed.get(row["rung"]) == row["name"]]


def _figure(count: int) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'covey[plot]'") from error
    figure = Figure(figsize=(10, 3 + 2.5 * count), layout="constrained")  # no display is needed
    return figure, list(figure.subplots(count, 1, squeeze=False)[:, 0])
