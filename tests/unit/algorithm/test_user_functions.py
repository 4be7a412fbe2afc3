"""Functions of the user's own, found by "module:function"."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from covey.algorithm.user_functions import user_function


def test_a_function_is_found_by_its_path() -> None:
    assert user_function("algorithm.loss", "math:hypot", ["grpo"]) is math.hypot


def test_a_module_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_functions_5.py").write_text("def twice(x):\n    return 2 * x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])  # as for a console script
    assert user_function("algorithm.advantage", "my_own_functions_5:twice", [])(4) == 8


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpro", "did you mean 'grpo'. known: grpo, or module:function"),
        ("no.such.module:f", "No module named 'no'"),
        ("math:no_such", "has no attribute 'no_such'"),
        ("math:pi", "is a float, not a function"),
        (":f", "is not found"),
    ],
)
def test_what_is_wrong_is_said_with_the_key(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("?", ".")) as caught:
        user_function("algorithm.loss", name, ["grpo"])
    assert "algorithm.loss" in str(caught.value)
