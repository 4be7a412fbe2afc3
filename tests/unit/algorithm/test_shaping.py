"""Reward shaping against DAPO's three cases and loops."""

from __future__ import annotations

import numpy as np
import pytest

from covey.algorithm.shaping import kl_per_response, overlong_penalty


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_overlong_penalty_by_the_papers_cases(factor: float) -> None:
    lengths = np.arange(0, 25).reshape(5, 5)
    got = overlong_penalty(lengths, max_response_length=20, buffer=6, factor=factor)
    for length, penalty in zip(lengths.ravel(), got.ravel(), strict=True):
        if length <= 14:
            assert penalty == 0.0
        elif length <= 20:
            assert penalty == pytest.approx(factor * (14 - length) / 6)
        else:
            assert penalty == -factor


def test_no_buffer_means_no_penalty() -> None:
    assert overlong_penalty(np.array([3, 99]), max_response_length=20, buffer=0, factor=1.0).tolist() == [0.0, 0.0]


def test_kl_is_summed_over_each_response() -> None:
    kl = np.array([0.5, 0.25, 1.0, 2.0, 4.0])
    assert kl_per_response(kl, np.array([2, 0, 3])).tolist() == [0.75, 0.0, 7.0]
    assert kl_per_response(np.zeros(0), np.zeros(2, dtype=np.int64)).tolist() == [0.0, 0.0]
