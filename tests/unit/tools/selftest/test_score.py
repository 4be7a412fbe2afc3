"""The reward of the two training steps, by hand."""

from __future__ import annotations

from covey.tools.selftest.score import distinct_characters


def test_the_reward_counts_distinct_characters() -> None:
    assert distinct_characters(["aab", "", "xyz"], [{}] * 3, {}) == [2 / 3, 0.0, 1.0]
