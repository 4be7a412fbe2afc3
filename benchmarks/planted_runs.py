"""Runs with a planted fault, and what `covey doctor RUN` says about each.

    python -m benchmarks.planted_runs [NAME ...] [--write]     # --write: rules and table of docs/doctor.md

Two kinds. Trained runs (trained_runs.py): a tiny model learns three-letter answers through `covey.trainer.train` under
a setting, data or a reward with the fault. Made runs (made_runs.py): the fault is in what the steps are drawn from.
Every run names the rules that must speak (bold in the table); the healthy ones must be quiet. What the doctor says of
the speed of trained runs is left out: it is about this machine.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from benchmarks.made_runs import Planted
from benchmarks.planted_faults import RUNS

from covey.findings import Finding
from covey.tools.doctor.rules import RULES
from covey.tools.doctor.run import diagnose, rules_page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "doctor.md"


def report(findings: list[Finding]) -> list[Finding]:
    """The findings that say something is wrong."""
    return [finding for finding in findings if finding.severity in ("warning", "failure")]


def verdict(planted: Planted, directory: Path) -> tuple[bool, list[Finding]]:
    """Make the run and ask the doctor: (every rule named speaks, and a healthy run's are quiet; what spoke)."""
    planted.make(directory)
    spoke = report(diagnose(directory)[1])
    if planted.kind == "trained":
        spoke = [f for f in spoke if RULES[f.rule].family != "speed" or f.rule in planted.rules]
    names = {finding.rule for finding in spoke}
    return (set(planted.rules) <= names if planted.rules else not names), spoke


def table(names: list[str], work: Path) -> tuple[list[str], list[str]]:
    """(lines of the Markdown table, the runs on which the doctor was wrong)."""
    lines, wrong = ["| run | fault | what doctor said |", "|---|---|---|"], []
    for name in names or list(RUNS):
        right, spoke = verdict(RUNS[name], work / name)
        said = "; ".join(
            f"{'**' if f.rule in RUNS[name].rules else ''}{f.rule}{'**' if f.rule in RUNS[name].rules else ''} "
            f"({f.severity}): {f.found}"
            for f in sorted(spoke, key=lambda f: f.rule not in RUNS[name].rules)
        )
        said = said.replace("|", "\\|")
        lines.append(f"| {name} ({RUNS[name].kind}) | {RUNS[name].fault} | {said or 'nothing'} |")
        print(lines[-1], flush=True)
        if not right:
            wrong.append(name)
    return lines, wrong


def replace_section(page: str, name: str, text: str) -> str:
    """The page with what stands between `<!-- NAME -->` and `<!-- end of NAME -->` replaced."""
    start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = page.split(start, 1)
    return f"{before}{start}\n\n{text.strip()}\n\n{end}{rest.split(end, 1)[1]}"


def main() -> int:
    """Print the table; 1 when the doctor misses a fault or speaks about a healthy run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs; default: all")
    parser.add_argument("--write", action="store_true", help="put the table, and the rules, into docs/doctor.md")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as work:
        lines, wrong = table(args.names, Path(work))
    if args.write:
        page = replace_section(PAGE.read_text(encoding="utf-8"), "rules", rules_page())
        PAGE.write_text(replace_section(page, "planted faults", "\n".join(lines)), encoding="utf-8")
    print(f"\n{len(lines) - 2} runs, doctor was wrong about {len(wrong)}: {', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
