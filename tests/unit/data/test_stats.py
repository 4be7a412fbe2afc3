"""Percentiles, shares and bars against numbers worked by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from covey.data.stats import histogram, share_over, summarize


@given(st.lists(st.integers(0, 50), min_size=1, max_size=60))
def test_figures_are_those_of_the_whole_list(lengths: list[int]) -> None:
    got = summarize(Counter(lengths))
    assert (got["rows"], got["min"], got["max"]) == (len(lengths), min(lengths), max(lengths))
    assert got["mean"] == round(float(np.mean(lengths)), 2)
    for p in (50, 90, 99):
        assert got[f"p{p}"] == np.percentile(lengths, p, method="inverted_cdf")
    assert share_over(Counter(lengths), 20) == np.mean(np.array(lengths) > 20)


def test_no_rows_give_no_figures() -> None:
    assert summarize(Counter()) == {"rows": 0}
    assert (histogram(Counter()), share_over(Counter(), 3)) == ([], 0.0)


def test_bars_are_as_long_as_their_share_of_the_longest() -> None:
    assert histogram(Counter({0: 1, 9: 3, 31: 8}), bins=4, width=8) == [
        " 0-7   #        1",
        " 8-15  ###      3",
        "16-23           0",
        "24-31  ######## 8",
    ]
