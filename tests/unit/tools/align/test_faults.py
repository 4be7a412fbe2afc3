"""Every planted fault is named by rung, step and cause; nothing planted, nothing named. Captures of a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.tools.align.faults import FAULTS, Fault, make_material, named_right, plant

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faults")
    make_material(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named(material: Path, fault: Fault) -> None:
    result = plant(fault, material)
    assert named_right(fault, result), result["first_divergence"]
    assert result["pass"] == (fault.rung == "")
    if fault.rung:  # nothing above the fault is blamed
        failed = [(row["rung"], row["name"]) for row in result["rungs"] if not row["pass"]]
        assert failed[0] == (fault.rung, fault.step)


def test_the_page_has_every_fault() -> None:
    page = (ROOT / "docs" / "alignment.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for fault in FAULTS:
        (row,) = [line for line in rows if line.startswith(f"| {fault.name} |")]
        assert row.split(" | ")[2].startswith(fault.kind or "pass")
    assert "named wrong" not in page
