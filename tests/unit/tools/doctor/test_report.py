"""What is printed of findings."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from benchmarks.planted_faults import RUNS
from rich.console import Console

from covey.findings import Finding
from covey.tools.doctor.evidence import Series
from covey.tools.doctor.report import print_findings, sparkline
from covey.tools.doctor.run import diagnose

WARNING = Finding("shm", "warning", "64 MB", "16 GiB", "SIGBUS", "--shm-size=16g", {"total_bytes": np.int64(5)})


def printed(findings, view=None) -> str:
    out = io.StringIO()
    print_findings(findings, view=view, console=Console(file=out, width=60, highlight=False))
    return out.getvalue()


def test_text_names_found_expected_why_and_fix_and_counts_the_rest():
    skipped = Finding("cann", "skipped", "does not apply: no NPU", "", "", "")
    text = printed([WARNING, Finding("disk", "ok", "90 GiB", "", "", ""), skipped])
    for part in ("64 MB", "16 GiB", "SIGBUS", "--shm-size=16g", "disk", "1 warnings", "1 do not apply (cann)"):
        assert part in text


def test_sparkline_has_lowest_and_highest_block_at_its_ends():
    line = sparkline(Series("x", np.array([1, 2, 3]), np.array([0.0, 0.5, 1.0])))
    assert line == "▁▅█  0 .. 1, steps 1 to 3"


def test_a_run_shows_the_metrics_of_a_finding(tmp_path: Path):
    RUNS["collapse"].make(tmp_path / "run")
    view, findings = diagnose(tmp_path / "run")
    text = printed(findings, view)
    assert "grpo/score/mean" in text
    assert "steps 1 to 40" in text
