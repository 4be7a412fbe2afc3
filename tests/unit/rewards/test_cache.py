"""Remembered scores."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.rewards.cache import Cache, key_maker
from covey.rewards.execute import FunctionSpec, Outcome

SPEC = FunctionSpec("math", "math", options={"weights": {"answer": 1.0}})


def key(spec: FunctionSpec = SPEC, row: dict[str, object] | None = None, text: str = "a", **extra: object) -> bytes:
    make = key_maker(spec, {"response": "4", "tests": [1, 2]} if row is None else row)
    assert make is not None
    return make(text, extra)


def test_key_depends_on_all_that_a_score_depends_on() -> None:
    others = [
        key(text="b"),
        key(row={"response": "5", "tests": [1, 2]}),
        key(row={"response": 4, "tests": [1, 2]}),
        key(row={"response": "4", "tests": (1, 2, 3)}),
        key(spec=FunctionSpec("math", "answer", options=SPEC.options)),
        key(spec=FunctionSpec("math", "math", options={"weights": {"answer": 2.0}})),
        key(spec=FunctionSpec("math", "math", options=SPEC.options, digest="edited")),
        key(num_tokens=3),
    ]
    assert len({key(), *others}) == len(others) + 1


def test_key_does_not_depend_on_order_label_or_weight() -> None:
    assert key() == key(row={"tests": [1, 2], "response": "4"})
    assert key() == key(spec=FunctionSpec("other", "math", weight=3.0, options=SPEC.options))


def test_row_that_is_not_plain_data_has_no_key() -> None:
    assert key_maker(SPEC, {"image": object()}) is None


def test_least_recently_used_leaves_first() -> None:
    cache = Cache(max_bytes=700)  # two entries without parts
    for name in (b"a", b"b"):
        cache.put(name, Outcome("ok", 1.0))
    assert cache.get(b"a") is not None
    cache.put(b"c", Outcome("ok", 3.0))
    assert cache.get(b"b") is None
    assert cache.get(b"a") == Outcome("ok", 1.0)
    assert cache.get(b"c") == Outcome("ok", 3.0)
    assert (cache.hits, cache.misses) == (3, 1)


@pytest.mark.parametrize("status", ["error", "timeout"])
def test_failures_are_not_remembered(status: str) -> None:
    cache = Cache(max_bytes=1000)
    cache.put(b"a", Outcome(status))  # type: ignore[arg-type]
    assert cache.get(b"a") is None


def test_file_keeps_scores_and_their_parts(tmp_path: Path) -> None:
    path = str(tmp_path / "cache.sqlite")
    first = Cache(10_000, path)
    first.put(b"a", Outcome("ok", 0.1 + 0.2, {"format": 1.0}))
    first.put(b"b", Outcome("none"))
    first.close()
    second = Cache(10_000, path)
    assert second.get(b"a") == Outcome("ok", 0.1 + 0.2, {"format": 1.0})
    assert second.get(b"b") == Outcome("none")
    assert second.get(b"c") is None
    second.close()


def test_file_is_bounded(tmp_path: Path) -> None:
    path = str(tmp_path / "cache.sqlite")
    cache = Cache(3000, path)  # ten entries
    for i in range(50):
        cache.put(bytes([i]), Outcome("ok", float(i)))
    cache.close()
    again = Cache(3000, path)
    assert sum(again.get(bytes([i])) is not None for i in range(50)) == 10
    assert again.get(bytes([49])) == Outcome("ok", 49.0)
    again.close()


def test_file_that_is_no_cache_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but long enough to be mistaken for one " * 40)
    with pytest.raises(ValueError, match=r"reward.cache_path: .*notes.txt"):
        Cache(1000, str(path))
