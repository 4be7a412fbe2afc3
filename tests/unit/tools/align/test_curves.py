"""Errors of curves against loops and numbers worked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from covey.commands.align import align_app
from covey.tools.align.curves import curves, smooth


def _run(directory: Path, values: dict[str, list[float]], first: int = 1) -> Path:
    directory.mkdir()
    lines = [
        json.dumps({"step": first + i} | {name: column[i] for name, column in values.items()})
        for i in range(len(next(iter(values.values()))))
    ]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def test_smoothing_is_a_trailing_mean() -> None:
    values = np.array([3.0, 1.0, 4.0, 1.0, 5.0])
    expected = [np.mean(values[max(0, i - 2) : i + 1]) for i in range(5)]
    assert smooth(values, 3) == pytest.approx(expected)
    assert smooth(values, 1) == pytest.approx(values)


def test_errors_by_hand(tmp_path: Path) -> None:
    a = _run(tmp_path / "a", {"grpo/score/mean": [0.5, 1.0], "sft/loss": [2.0, 1.0]})
    b = _run(tmp_path / "b", {"grpo/score/mean": [0.51, 1.03], "sft/loss": [2.02, 1.03]})
    result = curves(a, b, window=1)
    found = {curve["curve"]: curve for curve in result["curves"]}
    assert found["reward"]["error"] == pytest.approx((0.02 + 0.03) / 2) and found["reward"]["pass"]
    assert found["loss"]["error"] == pytest.approx((0.01 + 0.03) / 2) and found["loss"]["pass"]
    assert found["reward"]["bias"] == pytest.approx(0.02)
    assert result["pass"] and set(found) == {"loss", "reward"}


def test_a_curve_over_its_bar_fails(tmp_path: Path) -> None:
    a = _run(tmp_path / "a", {"grpo/score/mean": [0.5] * 10, "sft/loss": [1.0] * 10})
    b = _run(tmp_path / "b", {"grpo/score/mean": [0.515] * 10, "sft/loss": [1.03] * 10})
    result = curves(a, b)
    assert {c["curve"]: c["pass"] for c in result["curves"]} == {"loss": False, "reward": True}  # both are 3 % off
    assert not result["pass"]
    runner = CliRunner()
    assert runner.invoke(align_app, ["curves", str(a), str(b)]).exit_code == 1
    assert runner.invoke(align_app, ["curves", str(a), str(a), "--plot", str(tmp_path / "c.png")]).exit_code == 0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_near_zero_the_absolute_error_decides(tmp_path: Path) -> None:
    """An on-policy loss is rounding: 1e-9 against -1e-9 is 200 % and means nothing; 0.02 apart does."""
    a = _run(tmp_path / "a", {"actor/loss": [1e-9, -1e-9, 2e-9]})
    b = _run(tmp_path / "b", {"actor/loss": [-1e-9, 1e-9, 3e-9]})
    (curve,) = curves(a, b, window=1)["curves"]
    assert curve["kind"] == "absolute" and curve["pass"]
    far = _run(tmp_path / "far", {"actor/loss": [0.02, 0.02, 0.02]})
    assert not curves(a, far, window=1)["pass"]


def test_one_step_at_zero_does_not_decide(tmp_path: Path) -> None:
    """|b - a| / max(|a|, a tenth of the mean |a|), by a loop."""
    a, b = [0.0, 1.0, 1.0, 1.0], [0.01, 1.0, 1.0, 1.0]
    (curve,) = curves(
        _run(tmp_path / "a", {"grpo/score/mean": a}), _run(tmp_path / "b", {"grpo/score/mean": b}), window=1
    )["curves"]
    floor = 0.1 * sum(abs(x) for x in a) / len(a)
    expected = sum(abs(y - x) / max(abs(x), floor) for x, y in zip(a, b, strict=True)) / len(a)
    assert curve["error"] == pytest.approx(expected) and curve["pass"]


def test_a_nan_passes_nothing_and_no_common_step_is_an_error(tmp_path: Path) -> None:
    a = _run(tmp_path / "a", {"grpo/score/mean": [0.5, 0.6]})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text('{"step": 1, "grpo/score/mean": NaN}\n')
    assert not curves(a, tmp_path / "b")["pass"]
    late = _run(tmp_path / "late", {"grpo/score/mean": [0.5]}, first=7)
    with pytest.raises(ValueError, match="none in both"):
        curves(a, late)
    with pytest.raises(ValueError, match="give the output_dir of a run"):
        curves(a, tmp_path / "nowhere")
