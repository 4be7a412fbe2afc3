"""The whole selftest passes on a sound device, and replaces nothing but its own bundle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from covey import device as devices
from covey.tools.selftest import run

CPU = devices.resolve("cpu")


@pytest.mark.slow
def test_a_sound_device_passes_and_leaves_a_bundle(tmp_path: Path) -> None:
    seen: list[str] = []
    findings = run.run(tmp_path / "out", kind="cpu", on_finding=lambda finding: seen.append(finding.rule))
    assert {f.severity for f in findings} == {"ok", "skipped"}
    assert seen == [f.rule for f in findings]
    bundle = json.loads((tmp_path / "out" / "selftest.json").read_text())
    assert bundle["pass"] is True
    assert (
        bundle["packages"]["torch"] == torch.__version__.split("+")[0]
        or bundle["packages"]["torch"] == torch.__version__
    )
    assert [f["rule"] for f in bundle["findings"]] == seen
    trained = [json.loads(line) for line in (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(
        line["actor/grad_norm"] > 0 for line in trained if line["step"] > 0
    )  # steps that change nothing prove nothing


def test_other_content_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="is no earlier selftest"):
        run.run(tmp_path, kind="cpu")
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_one_process_has_nobody_to_exchange_with() -> None:
    (finding,) = run.check_exchanges(CPU)
    assert finding.severity == "skipped"
    assert "torchrun --nproc-per-node 2" in finding.fix
