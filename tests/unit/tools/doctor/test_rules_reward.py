"""Rules about rewards at the edge: what looks like the fault and is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.unit.tools.doctor.near import finding


def test_a_reward_that_stays_at_its_top_is_not_flat(tmp_path: Path):
    def solved(drawn, step, t):
        drawn.level = 0.95

    assert finding("reward_flat", tmp_path, solved).severity == "ok"


def test_one_failing_response_in_two_hundred_is_no_habit(tmp_path: Path):
    def one_in_two_steps(drawn, step, t):
        drawn.update["reward/errors"] = float(step % 2)

    assert finding("reward_errors", tmp_path, one_in_two_steps).severity == "ok"


def test_failures_are_not_counted_again_as_unscored(tmp_path: Path):
    def timeouts(drawn, step, t):
        drawn.none, drawn.update["reward/timeouts"] = 0.2, 0.2 * 128

    assert finding("unscored", tmp_path, timeouts).severity == "ok"


def test_form_and_content_that_improve_together_are_no_hack(tmp_path: Path):
    def both(drawn, step, t):
        drawn.parts = {"format": 0.2 + 0.7 * t}  # and answers from 0.3 to 0.8

    assert finding("format_hack", tmp_path, both).severity == "ok"


def test_held_out_rows_that_rise_half_as_much_are_no_gap(tmp_path: Path):
    found = finding("train_eval_gap", tmp_path, evaluations=lambda t: 0.3 + 0.25 * t)
    assert found.severity == "ok"


def test_scales_of_tasks_do_not_matter_when_groups_are_normalised(tmp_path: Path):
    def tasks(drawn, step, t):
        drawn.update |= {"task/a/std": 0.4, "task/b/std": 40.0}

    assert finding("task_scales", tmp_path / "norm", tasks).severity == "ok"
    centred = finding("task_scales", tmp_path / "center", tasks, algorithm={"advantage": "group_center"})
    assert centred.severity == "warning"
    ranged = {"functions": ["math"], "normalization": "range"}
    scaled = finding("task_scales", tmp_path / "range", tasks, algorithm={"advantage": "group_center"}, reward=ranged)
    assert scaled.severity == "ok"


def test_short_equal_answers_are_not_one_text_for_everything(tmp_path: Path):
    def yes(drawn, step, t):
        drawn.text, drawn.length = "yes", 2.0

    assert finding("responses_alike", tmp_path, yes).severity == "ok"


def test_a_solved_task_names_the_step_from_which_groups_have_no_spread(tmp_path: Path):
    def solved_from_21(drawn, step, t):
        if step > 20:
            drawn.right = np.ones(16)
            drawn.right[0] = 0

    found = finding("groups_all_right", tmp_path, solved_from_21)
    assert (found.severity, found.evidence["step"]) == ("warning", 21)


def test_passes_are_counted_from_prompts_and_batch(tmp_path: Path):
    """40 steps of 16 prompts are 640: 20 passes over 32 rows are the most, over 31 rows too many."""
    assert finding("data_exhausted", tmp_path / "32", prompts=32).severity == "ok"
    found = finding("data_exhausted", tmp_path / "31", prompts=31)
    assert (found.severity, found.evidence["step"]) == ("warning", 39)
