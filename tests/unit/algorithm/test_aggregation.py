"""Token weights against loops over responses."""

from __future__ import annotations

import numpy as np
import pytest

from covey.algorithm.aggregation import AGGREGATIONS, token_weights

LENGTHS = np.array([4, 3, 2, 0])
ALL = np.ones(4, dtype=bool)


def weights(kind: str, included: np.ndarray = ALL, lengths: np.ndarray = LENGTHS) -> list[float]:
    return token_weights(lengths, included, kind, num_responses=4, max_response_length=8).tolist()


def test_each_kind_by_hand() -> None:
    assert weights("token_mean") == pytest.approx([1 / 9, 1 / 9, 1 / 9, 0])
    assert weights("sequence_mean") == pytest.approx([1 / 16, 1 / 12, 1 / 8, 0])
    assert weights("constant") == pytest.approx([1 / 32, 1 / 32, 1 / 32, 0])
    assert weights("sequence_sum") == pytest.approx([1 / 4, 1 / 4, 1 / 4, 0])


def test_masked_response_leaves_the_token_count_but_not_the_response_count() -> None:
    included = np.array([False, True, True, True])
    assert weights("token_mean", included) == pytest.approx([0, 1 / 5, 1 / 5, 0])
    assert weights("sequence_mean", included) == pytest.approx([0, 1 / 12, 1 / 8, 0])
    assert weights("constant", included) == pytest.approx([0, 1 / 32, 1 / 32, 0])
    assert weights("sequence_sum", included) == pytest.approx([0, 1 / 4, 1 / 4, 0])


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_nothing_to_train_on_gives_weight_zero(kind: str) -> None:
    assert weights(kind, ~ALL) == [0.0] * 4
    assert weights(kind, ALL, np.zeros(4, dtype=np.int64)) == [0.0] * 4


def test_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"mean.*token_mean, sequence_mean, constant, sequence_sum"):
        weights("mean")
