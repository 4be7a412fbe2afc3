"""Advantages: how much better a response was than what was to be expected for its prompt.

Every function takes the rewards of one whole step, all ranks together, as (P, G) float64: G responses to each of P
prompts, NaN where no reward function could score the response. It returns (P, G) float64. Common rules:

- a reward of NaN gets advantage 0 and is left out of every mean and standard deviation;
- a group whose scored rewards are all equal, or that has fewer than two of them, gets exactly 0 (group baselines);
- the standard deviation is Bessel's (n - 1), in float64; `eps` is added to it (MindSpeed-RL 1e-6, TRL 1e-4).

An advantage belongs to a response; the caller repeats it over the response's tokens. There is no critic and no GAE.
"""

from __future__ import annotations

from collections.abc import Callable
from math import comb

import numpy as np

from covey.algorithm.user_functions import user_function


def group_norm(rewards: np.ndarray, *, eps: float) -> np.ndarray:
    """(r - mean of the group) / (std of the group + eps).

    Source: GRPO, arXiv:2402.03300 sec. 4.1.2. MindSpeed-RL's `group_norm` is this with eps 1e-6.
    Example: rewards [[1, 2]] give [[-0.70711, 0.70711]].
    """
    return group_center(rewards, eps=eps) / (_group_std(rewards) + _tiny(eps))


def group_center(rewards: np.ndarray, *, eps: float = 0.0) -> np.ndarray:
    """r - mean of the group; eps has no part in it.

    Source: Dr.GRPO, arXiv:2503.20783 sec. 3.2: the division by the standard deviation favours prompts that are nearly
    always or nearly never solved.
    """
    del eps
    return _zero_unscored(np.where(_has_spread(rewards), rewards - _group_mean(rewards), 0.0), rewards)


def rloo(rewards: np.ndarray, *, eps: float = 0.0) -> np.ndarray:
    """r - mean of the other responses of the group; eps has no part in it.

    Source: RLOO, arXiv:2402.14740 eq. 8. Equals group_center * n / (n - 1) for n scored responses.
    """
    del eps
    count = _scored(rewards).sum(axis=1, keepdims=True)
    return group_center(rewards) * np.where(count > 1, count / np.maximum(count - 1, 1), 0.0)


def batch_norm(rewards: np.ndarray, *, eps: float) -> np.ndarray:
    """(r - mean of the batch) / (std of the batch + eps): one baseline for all prompts, so G = 1 is allowed.

    Source: REINFORCE++, arXiv:2501.03262 sec. 3.2. A group of equal rewards is 0 only if the whole batch is equal.
    """
    flat = rewards.reshape(1, -1)
    return group_norm(flat, eps=eps).reshape(rewards.shape)


def batch_std(rewards: np.ndarray, *, eps: float) -> np.ndarray:
    """(r - mean of the group) / (std of all rewards of the batch + eps).

    Source: TRL's `scale_rewards="batch"`, after arXiv:2508.08221 (a group's mean, the batch's spread).
    """
    return group_center(rewards) / (_group_std(rewards.reshape(1, -1)) + _tiny(eps))


def group_center_batch_norm(rewards: np.ndarray, *, eps: float) -> np.ndarray:
    """c / (std of c over the batch + eps), where c = r - mean of the group.

    Source: REINFORCE++ with baseline, arXiv:2501.03262 sec. 3.3. The batch mean of c, which the paper subtracts, is 0
    by construction.
    """
    centered = np.where(_scored(rewards), group_center(rewards), np.nan)
    return group_center(rewards) / (_group_std(centered.reshape(1, -1)) + _tiny(eps))


def pass_at_k(rewards: np.ndarray, *, k: int, eps: float) -> np.ndarray:
    """Advantage of a response under the objective pass@k: the chance that the best of k samples is right.

    Each of the C(n, k) subsets of a group's n scored responses is one trial with the reward of its best member; a
    response's advantage is the mean of the normalised rewards of the trials it is part of. Any rewards are allowed:
    they are sorted and the subsets counted, not enumerated.

    Source: arXiv:2508.10751 sec. 2.3 (analytical form, for rewards 0 and 1). Standard deviation over trials is the
    population's, as there: all trials are known. Raises ValueError when 1 <= k <= G does not hold.
    """
    if not 1 <= k <= rewards.shape[1]:
        raise ValueError(f"pass@k advantage with k={k}: k must be between 1 and the {rewards.shape[1]} responses")
    out = np.zeros_like(rewards, dtype=np.float64)
    for row, group in enumerate(rewards):
        index = np.flatnonzero(~np.isnan(group))
        if len(index) >= max(k, 2) and group[index].min() < group[index].max():
            out[row, index] = _pass_at_k_group(group[index], k, _tiny(eps))
    return out


def gdpo(parts: np.ndarray, *, weights: np.ndarray, eps: float) -> np.ndarray:
    """Each reward function normalised within its group, summed with weights, then normalised over the batch.

    `parts` is (P, G, F) with NaN where function f did not score the response, `weights` (F,) or (P, F). Keeps
    combinations apart that give the same sum of rewards. A response that no function scored gets 0.

    Source: GDPO, arXiv:2601.05242; TRL's `normalize_then_sum`.
    """
    normed = np.stack([group_norm(parts[:, :, f], eps=eps) for f in range(parts.shape[2])], axis=2)
    per_prompt = np.broadcast_to(weights, (parts.shape[0], parts.shape[2]))[:, None, :]
    total = np.where(np.isnan(parts).all(axis=2), np.nan, (normed * per_prompt).sum(axis=2))
    return batch_norm(total, eps=eps)


def groups_to_keep(rewards: np.ndarray) -> np.ndarray:
    """(P,) bool: the groups with at least two different scored rewards; the others have no gradient.

    Source: DAPO's dynamic sampling, arXiv:2503.14476 sec. 3.2.
    """
    return _has_spread(rewards)[:, 0]


def _pass_at_k_group(rewards: np.ndarray, k: int, eps: float) -> np.ndarray:
    """`pass_at_k` of one group of n scored rewards that are not all equal."""
    n = len(rewards)
    order = np.argsort(rewards, kind="stable")
    ordered = rewards[order]
    # The best member of a subset stands last in sorted order: rank i is it in C(i, k - 1) subsets.
    best_count = np.array([comb(i, k - 1) for i in range(n)], dtype=np.float64)
    mean = (ordered * best_count).sum() / comb(n, k)
    std = np.sqrt((((ordered - mean) ** 2) * best_count).sum() / comb(n, k))
    # Subsets with rank i: it is the best of C(i, k - 1); rank j > i is the best of C(j - 1, k - 2) of them.
    beside = np.array([comb(j - 1, k - 2) if k >= 2 and j >= 1 else 0 for j in range(n)], dtype=np.float64)
    above = np.append(np.cumsum((ordered * beside)[::-1])[::-1][1:], 0.0)
    out = np.zeros(n)
    out[order] = ((ordered * best_count + above) / comb(n - 1, k - 1) - mean) / (std + eps)
    return out


def _scored(rewards: np.ndarray) -> np.ndarray:
    return ~np.isnan(rewards)


def _zero_unscored(values: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    return np.where(_scored(rewards), values, 0.0)


def _has_spread(rewards: np.ndarray) -> np.ndarray:
    """(P, 1) bool. Compares rewards, not their std: the mean of equal floats can differ from them in the last bit."""
    low = np.where(_scored(rewards), rewards, np.inf).min(axis=1, keepdims=True, initial=np.inf)
    high = np.where(_scored(rewards), rewards, -np.inf).max(axis=1, keepdims=True, initial=-np.inf)
    return low < high


def _group_mean(rewards: np.ndarray) -> np.ndarray:
    """(P, 1) mean of the scored rewards; 0 where there are none."""
    count = _scored(rewards).sum(axis=1, keepdims=True)
    return _zero_unscored(rewards, rewards).sum(axis=1, keepdims=True) / np.maximum(count, 1)


def _group_std(rewards: np.ndarray) -> np.ndarray:
    """(P, 1) Bessel standard deviation of the scored rewards; 0 where there are fewer than two."""
    count = _scored(rewards).sum(axis=1, keepdims=True)
    squares = _zero_unscored((rewards - _group_mean(rewards)) ** 2, rewards).sum(axis=1, keepdims=True)
    return np.sqrt(squares / np.maximum(count - 1, 1))


def _tiny(eps: float) -> float:
    """`eps`, kept above 0 so that a numerator of exactly 0 over a deviation of 0 stays 0."""
    return max(eps, float(np.finfo(np.float64).tiny))


Advantage = Callable[..., np.ndarray]
ADVANTAGES: dict[str, Advantage] = {
    "group_norm": group_norm,
    "group_center": group_center,
    "rloo": rloo,
    "batch_norm": batch_norm,
    "batch_std": batch_std,
    "group_center_batch_norm": group_center_batch_norm,
}


def find_advantage(name: str) -> Advantage:
    """The advantage called `name`, or the user's at "module:function"; ValueError with the known names without one.

    A user's function is called as the ones above, with rewards (P, G) and eps. What it returns is checked at every step
    (ValueError): an array (P, G), finite where there is a reward. Elsewhere the advantage is 0, whatever it says.
    """
    if name in ADVANTAGES:
        return ADVANTAGES[name]
    function = user_function("algorithm.advantage", name, ADVANTAGES)

    def checked(rewards: np.ndarray, *, eps: float) -> np.ndarray:
        values = np.asarray(function(rewards.copy(), eps=eps), dtype=np.float64)
        if values.shape != rewards.shape:
            raise ValueError(
                f"algorithm.advantage={name!r} returned shape {values.shape} for rewards {rewards.shape} "
                "(prompts, responses): return one advantage for each reward"
            )
        if (bad := ~np.isfinite(values) & _scored(rewards)).any():
            p, g = (int(i) for i in np.argwhere(bad)[0])
            raise ValueError(
                f"algorithm.advantage={name!r} returned {values[p, g]} for reward {rewards[p, g]} of prompt {p}, "
                f"response {g}: return finite numbers; rewards of the group: {rewards[p].tolist()}"
            )
        return _zero_unscored(values, rewards)

    return checked
