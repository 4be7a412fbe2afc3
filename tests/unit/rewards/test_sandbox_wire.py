"""Values that cross from the candidate to the judge: by value, and of exact builtin types."""

from __future__ import annotations

import collections
import decimal
import enum
import fractions
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.rewards.inside.judge import Remote, update_in_place
from covey.rewards.inside.wire import decode, encode

ATOMS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary() | st.fractions()
)
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(KEYS, max_size=4)
        | st.frozensets(KEYS, max_size=4)
    ),
    max_leaves=20,
)


def refuse(value: Any) -> Any:
    raise TypeError(type(value).__name__)


def through(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, refuse))), lambda index: index)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_plain_data_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    back = through(value)
    assert back == value
    assert type(back) is type(value)


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class Colour(enum.IntEnum):
    RED = 3


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Liar(7), 7),
        (Colour.RED, 3),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.OrderedDict(a=1), {"a": 1}),
        (collections.deque([1, 2]), [1, 2]),
        (type("Text", (str,), {"__eq__": lambda *_: True, "__hash__": None})("x"), "x"),
        (type("Items", (list,), {"__eq__": lambda *_: True})([1]), [1]),
        (bytearray(b"ab"), b"ab"),
        (decimal.Decimal("1.50"), decimal.Decimal("1.5")),
        (fractions.Fraction(1, 3), fractions.Fraction(1, 3)),
        (2 + 3j, 2 + 3j),
        (10**400, 10**400),
        (float("inf"), float("inf")),
    ],
)
def test_subclasses_lose_what_they_override(value: Any, plain: Any) -> None:
    back = through(value)
    assert type(back) is type(plain)
    assert plain == back


@pytest.mark.parametrize("value", [object(), lambda: 1, {1: object()}, [print], type("Decimal", (), {})()])
def test_what_is_not_plain_is_handed_to_the_caller(value: Any) -> None:
    with pytest.raises(TypeError):
        through(value)


def test_lists_maps_and_sets_are_updated_in_place() -> None:
    items, mapping, members, fixed = [3, 1], {"a": 1}, {1}, (1, 2)
    for old, new in ((items, [1, 3]), (mapping, {"b": 2}), (members, {2, 3}), (fixed, (9,)), (items, None)):
        update_in_place(old, new)
    assert (items, mapping, members, fixed) == ([1, 3], {"b": 2}, {2, 3}, (1, 2))


def test_an_object_of_the_program_has_no_equality() -> None:
    remote = Remote(lambda *_: True, 0)
    for compare in (
        lambda: remote == 1,
        lambda: remote != 1,
        lambda: remote < 1,
        lambda: remote in [1],
        lambda: {remote},
    ):
        with pytest.raises(TypeError):
            compare()
