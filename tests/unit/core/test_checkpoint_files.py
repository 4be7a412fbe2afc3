"""Which checkpoints are whole, and which stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covey.checkpoint_files import MARKER, Keep, complete, damage, sizes, superfluous


def make(root: Path, step: int, **metrics: float) -> Path:
    directory = root / f"step-{step:06d}"
    (directory / "hf").mkdir(parents=True)
    (directory / "state.json").write_text(json.dumps({"metrics": metrics}))
    (directory / "hf" / "config.json").write_text("{}")
    (directory / MARKER).write_text(json.dumps(sizes(directory)))
    return directory


def test_a_whole_checkpoint_has_no_damage_and_is_listed_in_order(tmp_path: Path) -> None:
    later, earlier = make(tmp_path, 12), make(tmp_path, 3)
    assert complete(tmp_path) == [earlier, later]
    assert damage(later) is None


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("state.json", "{}", r"state.json has 2 bytes, was written with \d+"),
        ("hf/config.json", None, "hf/config.json is missing"),
        (MARKER, "{", f"{MARKER} does not read back"),
        (MARKER, None, "is not complete"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    directory = make(tmp_path, 1)
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_text(content)
    found = damage(directory)
    assert found is not None
    with pytest.raises(ValueError, match=words):
        raise ValueError(found)


def test_the_last_the_regular_and_the_best_ones_stay(tmp_path: Path) -> None:
    for step in range(1, 9):
        make(tmp_path, step, reward=-abs(step - 3.0))
    kept = {4, 8, 3, 7}  # every fourth, the best, the last two
    gone = superfluous(tmp_path, Keep(last=2, every=4, best="reward"))
    assert {int(path.name[-6:]) for path in gone} == set(range(1, 9)) - kept
