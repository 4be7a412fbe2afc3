"""The entropy controller: the worked example, its bounds, and what it does with bad numbers."""

from __future__ import annotations

import math

import pytest

from covey.algorithm.entropy import EntropyController


def controller(coef: float) -> EntropyController:
    return EntropyController(coef, target=0.5, delta=0.005, largest=0.012)


def test_the_bonus_is_off_until_something_was_measured() -> None:
    assert controller(0.01).weight == 0.0


def test_the_weight_grows_below_the_target_and_is_off_above_it() -> None:
    low = controller(0.0).update(0.4)
    assert (low.coef, low.weight) == (0.005, 0.005)
    high = low.update(0.6)
    assert (high.coef, high.weight) == (0.0, 0.0)
    assert high.update(0.5).weight == 0.005  # at the target counts as below it


def test_the_weight_stays_between_its_bounds() -> None:
    grown = controller(0.01).update(0.1)
    assert grown.coef == pytest.approx(0.012)
    assert controller(0.001).update(3.0).coef == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_measurement_that_is_not_finite_changes_nothing(bad: float) -> None:
    before = controller(0.01).update(0.4)
    assert before.update(bad) == before
