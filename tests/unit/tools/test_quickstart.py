"""The quickstart's guard of the output directory and its curve. Learning itself: tests/e2e/test_quickstart.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.tools import quickstart


def test_a_directory_with_other_content_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"thesis.txt is not of an earlier quickstart; choose another directory"):
        quickstart.run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="is a file; choose a directory"):
        quickstart.run(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_the_curve_rises_from_the_lowest_to_the_highest_block() -> None:
    assert quickstart.sparkline([0, 1, 2, 3, 4, 5, 6, 7, 8], low=0, high=8, width=9) == "▁▂▃▄▅▆▇██"
    assert quickstart.sparkline([0, 2, 10, 10], low=0, high=2, width=2) == "▅█"


def test_the_curve_of_few_values_is_short_and_of_none_empty() -> None:
    assert quickstart.sparkline([1.0, -5.0], low=0, high=1, width=30) == "█▁"
    assert quickstart.sparkline([], low=0, high=1) == ""
