"""Findings on the terminal; metrics of a run as lines of block characters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.markup import escape

from covey.findings import Finding
from covey.tools.doctor.evidence import RunView, Series

_MARKS = {"ok": "[green]ok[/green]", "warning": "[yellow]warning[/yellow]", "failure": "[red]failure[/red]"}
_BLOCKS = "▁▂▃▄▅▆▇█"


def print_findings(findings: Sequence[Finding], *, view: RunView | None = None, console: Console | None = None) -> None:
    """What is wrong with cause and remedy, then one line of what is well and of what does not apply."""
    console = console or Console(highlight=False)
    for finding in findings:
        if finding.severity in ("warning", "failure"):
            _print_one(finding, view, console)
    for finding in findings:
        if finding.severity == "ok" and view is None:
            console.print(f"{_MARKS['ok']} {finding.rule:<16} {escape(finding.found)}", soft_wrap=True)
    counts = {
        severity: sum(f.severity == severity for f in findings) for severity in ("failure", "warning", "ok", "skipped")
    }
    skipped = ", ".join(finding.rule for finding in findings if finding.severity == "skipped")
    console.print(
        f"{len(findings)} checks: {counts['failure']} failures, {counts['warning']} warnings, {counts['ok']} ok, "
        f"{counts['skipped']} do not apply" + (f" ({skipped})" if skipped else ""),
        soft_wrap=True,
    )


def sparkline(series: Series, width: int = 48) -> str:
    """`▁▃▅█  0.12 .. 0.91, steps 1 to 100`: means of at most `width` equal parts, lowest to highest."""
    if not len(series):
        return ""
    parts = np.array([part.mean() for part in np.array_split(series.values, min(width, len(series)))])
    low, high = float(parts.min()), float(parts.max())
    levels = (parts - low) / (high - low) * (len(_BLOCKS) - 1) if high > low else np.zeros(len(parts))
    line = "".join(_BLOCKS[round(float(level))] for level in levels)
    return f"{line}  {low:.4g} .. {high:.4g}, steps {series.steps[0]} to {series.steps[-1]}"


def _print_one(finding: Finding, view: RunView | None, console: Console) -> None:
    step = finding.evidence.get("step")
    since = f" (from step {step})" if step else ""
    console.print(f"{_MARKS[finding.severity]} [bold]{escape(finding.rule)}[/bold]{since}", soft_wrap=True)
    for label, text in (
        ("found", finding.found),
        ("expected", finding.expected),
        ("why", finding.why),
        ("fix", finding.fix),
    ):
        console.print(f"  {label:<9}{escape(text)}", soft_wrap=True)
    if view is not None:
        for name in finding.evidence.get("metrics", ()):
            console.print(f"  {name:<28} {sparkline(view.series(name))}", soft_wrap=True, markup=False)
