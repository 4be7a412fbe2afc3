"""`covey doctor RUN`: what went wrong in a run, with numbers, step and remedy; and the page of its rules."""

from __future__ import annotations

from pathlib import Path

from covey.findings import Finding
from covey.tools.doctor.evidence import Rule, RunView, read_run
from covey.tools.doctor.rules import RULES

FAMILIES = {
    "reward": "The reward does not rise, falls, or rises for the wrong reason",
    "policy": "The update goes wrong",
    "length": "Responses have the wrong length",
    "memory": "Memory",
    "speed": "Speed",
}


def diagnose(directory: str | Path) -> tuple[RunView, list[Finding]]:
    """A run and what every rule says about it, failures first."""
    view = read_run(directory)
    order = {"failure": 0, "warning": 1, "ok": 2, "skipped": 3}
    return view, sorted((apply(rule, view) for rule in RULES.values()), key=lambda finding: order[finding.severity])


def apply(rule: Rule, view: RunView) -> Finding:
    """One rule's finding."""
    missing = [name for name in rule.needs if not view.has(name)]
    if missing or len(view.steps) < rule.min_steps:
        reason = f"not reported: {', '.join(missing)}" if missing else f"fewer than {rule.min_steps} steps"
        return Finding(rule.name, "skipped", f"does not apply: {reason}", rule.expected, rule.why, "")
    seen = rule.check(view)
    if seen is None:
        return Finding(rule.name, "ok", "as expected", rule.expected, rule.why, "")
    evidence = {"step": seen.step, "metrics": [name for name in seen.plots if view.has(name)], **seen.numbers}
    return Finding(rule.name, seen.severity, seen.found, rule.expected, rule.why, seen.fix or rule.fix, evidence)


def rules_page() -> str:
    """The rules as Markdown: the generated part of docs/doctor.md."""
    lines: list[str] = []
    for family, title in FAMILIES.items():
        lines += [
            f"### {title}",
            "",
            "| rule | looks at | expected | why it matters | remedy |",
            "|---|---|---|---|---|",
        ]
        for rule in RULES.values():
            if rule.family == family:
                needs = ", ".join(f"`{name}`" for name in rule.needs)
                cells = (f"`{rule.name}`", needs, rule.expected, rule.why, rule.fix)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)
