"""The statistics that rules use, against numbers worked by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from benchmarks.made_runs import make_run

from covey.tools.doctor.evidence import Series, first_step, read_run


def series(*values: float) -> Series:
    return Series("x", np.arange(1, len(values) + 1), np.array(values, dtype=float))


def test_windows_are_thirds_of_at_least_three():
    nine = series(*range(9))
    assert nine.early.tolist() == [0, 1, 2]
    assert nine.late.tolist() == [6, 7, 8]
    assert series(1, 2, 3, 4).late.tolist() == [2, 3, 4]


def test_noise_ignores_a_trend():
    assert series(*range(10)).noise == 0.0
    # differences +2, -2, ...: mean of eight is 0, their deviation 2, over the root of 2
    assert series(0, 2, 0, 2, 0, 2, 0, 2, 0).noise == pytest.approx(2 / math.sqrt(2))


def test_rise_and_its_error():
    steps = series(0, 2, 0, 4, 4, 4, 6, 8, 6)
    assert steps.rise == pytest.approx(20 / 3 - 2 / 3)
    assert steps.rise_error == pytest.approx(steps.noise * math.sqrt(2 / 3))


def test_first_step_of_a_condition():
    values = series(1, 5, 2, 7)
    assert first_step(values, values.values > 4) == 2
    assert first_step(values, values.values > 9) is None


def test_run_is_read_as_it_was_written(tmp_path: Path):
    make_run(tmp_path, steps=6, prompts=1234, evaluations=lambda t: t)
    view = read_run(tmp_path)
    assert [line["step"] for line in view.steps] == [1, 2, 3, 4, 5, 6]
    assert view.num_prompts == 1234
    assert view.num_responses == 128
    assert view.updates_per_step == 1
    assert view.reward_range == (0.0, 1.0)
    assert [record.step for record in view.records] == [1, 3, 6]
    assert view.finished
    assert len(view.series("grpo/score/mean")) == 6


def test_values_that_are_not_finite_are_left_out_of_a_series(tmp_path: Path):
    def change(drawn, step, t):
        drawn.update["actor/entropy"] = math.nan if step == 2 else float(step)

    make_run(tmp_path, change, steps=4)
    assert read_run(tmp_path).series("actor/entropy").values.tolist() == [1.0, 3.0, 4.0]
