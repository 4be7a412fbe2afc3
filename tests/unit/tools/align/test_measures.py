"""Distances worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from covey.tools.align.budget import parse_bytes
from covey.tools.align.measures import measure, profile_named


def test_measures_by_hand() -> None:
    found = measure(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 5.0]]))
    assert found.relative_l2 == pytest.approx(0.2) and found.max_abs == 1.0
    assert found.cosine == pytest.approx(29 / (5 * math.sqrt(34)))
    assert found.norm_ratio == pytest.approx(math.sqrt(34) / 5)
    assert measure(torch.zeros(2, 3), torch.zeros(2, 3)).relative_l2 == 0.0
    assert not measure(torch.zeros(2, 3), torch.ones(2, 3)).finite
    assert not measure(torch.ones(2), torch.tensor([1.0, float("nan")])).finite
    assert measure(torch.zeros(0, 4), torch.zeros(0, 4)).cosine == 1.0


def test_the_worst_row_is_of_the_mean_size() -> None:
    a = torch.ones(100, 4)
    b = a.clone()
    b[7] *= 2
    found = measure(a, b)
    assert found.worst_row == pytest.approx(1.0) and found.relative_l2 == pytest.approx(0.1)


def test_sizes_and_profiles_are_read_or_refused() -> None:
    assert [parse_bytes(text) for text in ("256MiB", "2GB", "500000")] == [256 << 20, 2 * 10**9, 500000]
    with pytest.raises(ValueError, match="--budget many"):
        parse_bytes("many")
    with pytest.raises(ValueError, match="known are fp32, bf16, bf16-npu"):
        profile_named("fp8")
