"""What the doctor says about a run that is healthy but for one thing drawn otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.made_runs import Change, make_run

from covey.findings import Finding
from covey.tools.doctor.evidence import read_run
from covey.tools.doctor.rules import RULES
from covey.tools.doctor.run import apply


def finding(rule: str, directory: Path, change: Change | None = None, **run: Any) -> Finding:
    """One rule's finding about a made run."""
    make_run(directory, change, **run)
    return apply(RULES[rule], read_run(directory))
