"""Loading reward functions by name and checking what they return."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from covey.rewards.base import REWARDS, check_score, load_reward, read_options

SOURCE = "def one(responses, rows, config):\n    return [1.0] * len(responses)\n\nnumber = 3\n"


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_every_registered_name_loads(name: str) -> None:
    assert callable(load_reward(name))


def test_unknown_name_names_the_nearest_and_all_known() -> None:
    with pytest.raises(ValueError, match=r"'mathh' is unknown, did you mean 'math'\? Known: .*format.*math"):
        load_reward("mathh")


def test_function_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    assert load_reward(f"{tmp_path}/mine.py:one")(["a", "b"], [{}, {}], {}) == [1.0, 1.0]


def test_function_of_a_module_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "covey_test_module_cwd.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    assert load_reward("covey_test_module_cwd:one")(["a"], [{}], {}) == [1.0]


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (SOURCE, "mine.py:onee", "no 'onee' there, did you mean 'one'"),
        (SOURCE, "mine.py:number", "is a int, not a function"),
        ("import no_such_module_xyz\n", "mine.py:one", "does not import: No module named 'no_such_module_xyz'"),
        ("def broken(:\n", "mine.py:one", "does not import"),
        (SOURCE, "other.py:one", "no file"),
        (SOURCE, "no_such_module_xyz:one", "module 'no_such_module_xyz' does not import"),
    ],
)
def test_what_cannot_be_loaded_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, name: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_reward(name)


@pytest.mark.parametrize("value", [1, 0.5, True, np.float32(0.25), np.int64(2)])
def test_numbers_are_scores(value: object) -> None:
    assert check_score(value) == (float(value), {})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1.0", b"1", [1.0], object(), {"format": 1.0}])
def test_anything_else_is_not_a_score(value: object) -> None:
    with pytest.raises(ValueError, match="a score|without 'score'"):
        check_score(value)


def test_a_dict_gives_a_score_and_its_parts() -> None:
    assert check_score({"score": 1, "format": True, "why": None}) == (1.0, {"format": 1.0})
    assert check_score({"score": None}) == (None, {})
    with pytest.raises(ValueError, match="type str"):
        check_score({"score": 1.0, "format": "yes"})


def test_unknown_option_names_the_nearest() -> None:
    assert read_options({"a": 2}, {"a": 1, "b": 3}) == {"a": 2, "b": 3}
    with pytest.raises(ValueError, match=r"'weigts' is unknown: did you mean 'weights'"):
        read_options({"weigts": 1}, {"weights": 1})
