"""Advantages against TRL's and MindSpeed-RL's numbers, loops over responses, and enumeration of subsets."""

from __future__ import annotations

from itertools import combinations
from statistics import mean, pstdev, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from covey.algorithm.advantages import ADVANTAGES, find_advantage, gdpo, groups_to_keep, pass_at_k

NAN = float("nan")
# TRL 1.16, G = 4, two reward functions with weights 1 and 0.5.
PART_1 = np.array([[1, 0, 1, 0], [1, 1, 1, 1]], dtype=np.float64)
PART_2 = np.array([[0.2, 0.5, NAN, 0.1], [0.9, NAN, 0.3, 0.4]])
REWARDS = PART_1 + 0.5 * np.nan_to_num(PART_2)
GROUP_BASELINES = ["group_norm", "group_center", "rloo", "batch_std", "group_center_batch_norm"]

rewards_with_gaps = hnp.arrays(
    np.float64, st.tuples(st.integers(1, 4), st.integers(2, 5)), elements=st.sampled_from([0.0, 0.1, 0.7, 1.0, NAN])
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("group_norm", [0.948, -0.663, 0.758, -1.042, 1.336, -1.068, -0.267, 0]),
        ("batch_std", [1.027, -0.719, 0.821, -1.129, 0.513, -0.411, -0.103, 0]),
        ("group_center", [0.5, -0.35, 0.4, -0.55, 0.25, -0.2, -0.05, 0]),
    ],
)
def test_trl_vectors(name: str, expected: list[float]) -> None:
    assert ADVANTAGES[name](REWARDS, eps=1e-4).ravel() == pytest.approx(expected, abs=1e-3)


def test_gdpo_equals_trl_normalize_then_sum() -> None:
    expected = [1.006, -0.436, 1.234, -1.805, 0.813, 0, -0.517, -0.296]
    got = gdpo(np.stack([PART_1, PART_2], axis=2), weights=np.array([1, 0.5]), eps=1e-4)
    assert got.ravel() == pytest.approx(expected, abs=1e-3)


def test_group_norm_equals_mindspeed_rl() -> None:
    assert ADVANTAGES["group_norm"](np.array([[1.0, 2.0]]), eps=1e-6).ravel() == pytest.approx(
        [-0.70711, 0.70711], abs=1e-5
    )


@given(rewards_with_gaps)
def test_group_norm_and_rloo_by_a_loop(rewards: np.ndarray) -> None:
    norm, leave_one_out = ADVANTAGES["group_norm"](rewards, eps=1e-6), ADVANTAGES["rloo"](rewards, eps=1e-6)
    for p, group in enumerate(rewards.tolist()):
        scored = [r for r in group if r == r]
        for g, reward in enumerate(group):
            if reward != reward or len(scored) < 2 or len(set(scored)) == 1:
                assert norm[p, g] == 0.0 and leave_one_out[p, g] == 0.0
                continue
            assert norm[p, g] == pytest.approx((reward - mean(scored)) / (stdev(scored) + 1e-6), rel=1e-9)
            assert leave_one_out[p, g] == pytest.approx(reward - (sum(scored) - reward) / (len(scored) - 1), rel=1e-9)


@given(rewards_with_gaps)
def test_batch_baselines_by_a_loop(rewards: np.ndarray) -> None:
    norm, with_group = (
        ADVANTAGES["batch_norm"](rewards, eps=1e-6),
        ADVANTAGES["group_center_batch_norm"](rewards, eps=1e-6),
    )
    scored = rewards[~np.isnan(rewards)].tolist()
    if len(set(scored)) < 2:
        assert not norm.any() and not with_group.any()
        return
    centered = [r - mean(x for x in group if x == x) for group in rewards.tolist() for r in group if r == r]
    for p, g in zip(*np.nonzero(~np.isnan(rewards)), strict=True):
        assert norm[p, g] == pytest.approx((rewards[p, g] - mean(scored)) / (stdev(scored) + 1e-6), abs=1e-9)
        own = rewards[p, g] - mean(r for r in rewards[p].tolist() if r == r)
        assert with_group[p, g] == pytest.approx(own / (stdev(centered) + 1e-6), abs=1e-6)


@pytest.mark.parametrize("name", GROUP_BASELINES)
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e9])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_equal_rewards_give_exactly_zero(name: str, value: float, eps: float) -> None:
    """Values whose float mean differs from them in the last bit, in a batch where another group has spread."""
    rewards = np.array([[value] * 7, [0, 1, 1, 0, 0, 1, 0]])
    advantages = ADVANTAGES[name](rewards, eps=eps)
    assert not advantages[0].any()
    assert advantages[1].all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_unscored_responses_do_not_change_the_others(name: str) -> None:
    rewards = np.array([[1.0, 0.0, 0.5], [0.2, 0.9, 0.4]])
    padded = np.array([[1.0, NAN, 0.0, 0.5], [0.2, 0.9, 0.4, NAN]])
    got = ADVANTAGES[name](padded, eps=1e-6)
    assert got[np.isnan(padded)].tolist() == [0.0, 0.0]
    assert got[~np.isnan(padded)] == pytest.approx(ADVANTAGES[name](rewards, eps=1e-6).ravel())


@pytest.mark.parametrize("name", ADVANTAGES)
def test_nothing_or_one_thing_scored_gives_zero(name: str) -> None:
    for rewards in (np.full((2, 3), NAN), np.array([[NAN, 0.7, NAN]]), np.zeros((0, 3))):
        assert ADVANTAGES[name](rewards, eps=1e-6).tolist() == np.zeros_like(rewards).tolist()


@given(rewards_with_gaps, st.integers(1, 5))
def test_pass_at_k_by_enumeration_of_subsets(rewards: np.ndarray, k: int) -> None:
    if k > rewards.shape[1]:
        with pytest.raises(ValueError, match=f"k={k}"):
            pass_at_k(rewards, k=k, eps=1e-6)
        return
    got = pass_at_k(rewards, k=k, eps=1e-6)
    for p, group in enumerate(rewards.tolist()):
        scored = [g for g, reward in enumerate(group) if reward == reward]
        trials = {subset: max(group[g] for g in subset) for subset in combinations(scored, k)}
        for g in range(len(group)):
            expected = 0.0
            if g in scored and len({group[i] for i in scored}) > 1 and trials:
                best, spread = list(trials.values()), pstdev(trials.values())
                expected = mean((trials[s] - mean(best)) / (spread + 1e-6) for s in trials if g in s)
            assert got[p, g] == pytest.approx(expected, abs=1e-6)


def test_pass_at_k_with_one_right_answer_rewards_it_more_than_pass_at_1() -> None:
    """The paper's closed form for N_pos = 1, N_neg = 3, k = 2: P(pass) = 1/2, so right: 1, wrong: -1/3."""
    got = pass_at_k(np.array([[0.0, 1.0, 0.0, 0.0]]), k=2, eps=0.0)
    assert got.ravel() == pytest.approx([-1 / 3, 1.0, -1 / 3, -1 / 3])


def test_groups_to_keep_are_those_with_two_different_scores() -> None:
    rewards = np.array([[1, 1, 1], [0, 1, 1], [NAN, 1, 1], [NAN, 0, 1], [NAN, NAN, 1], [NAN, NAN, NAN]])
    assert groups_to_keep(rewards).tolist() == [False, True, False, True, False, False]


def rank(rewards: np.ndarray, *, eps: float) -> np.ndarray:
    """A user's advantage: the place in the group, worst first; does not look after unscored ones."""
    del eps
    return rewards.argsort(axis=1).argsort(axis=1).astype(float)


def too_few(rewards: np.ndarray, *, eps: float) -> np.ndarray:
    return rewards[:, :1] * eps


def divides(rewards: np.ndarray, *, eps: float) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return rewards / (rewards - rewards)


def overwrites(rewards: np.ndarray, *, eps: float) -> np.ndarray:
    rewards[:] = 0.0
    return rewards


def test_a_users_function_is_found_and_unscored_responses_get_0() -> None:
    rewards = np.array([[3.0, 1.0, 2.0], [NAN, 5.0, 4.0]])
    found = find_advantage(f"{__name__}:rank")(rewards, eps=1e-6)
    assert found.tolist() == [[2.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    assert find_advantage("rloo") is ADVANTAGES["rloo"]


def test_what_a_users_function_returns_is_checked() -> None:
    rewards = np.array([[3.0, 1.0], [2.0, 4.0]])
    with pytest.raises(ValueError, match=r"too_few' returned shape \(2, 1\) for rewards \(2, 2\)"):
        find_advantage(f"{__name__}:too_few")(rewards, eps=1e-6)
    with pytest.raises(ValueError, match=r"divides' returned inf for reward 3.0 of prompt 0, response 0"):
        find_advantage(f"{__name__}:divides")(rewards, eps=1e-6)
    find_advantage(f"{__name__}:overwrites")(rewards, eps=1e-6)
    assert rewards.tolist() == [[3.0, 1.0], [2.0, 4.0]]
