"""From the rewards of a step to its advantages, as the configuration says.

    shaped = reward - overlong penalty - kl_coef * KL of the response          (the terms that are switched on)
    A = advantage(shaped)

`gdpo` compares each reward function by itself: there the penalty is one more function, of weight 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from covey.algorithm.advantages import ADVANTAGES, find_advantage, gdpo, pass_at_k
from covey.algorithm.kl import KL_ESTIMATORS
from covey.algorithm.shaping import kl_per_response, overlong_penalty
from covey.algorithm.user_functions import user_function
from covey.config.schema import AlgorithmConfig
from covey.types import Group, StepBatch

ADVANTAGE_NAMES = (*ADVANTAGES, "pass_at_k", "gdpo")


def check_advantage(name: str) -> None:
    """ValueError when `algorithm.advantage` is no known name and no function that can be imported."""
    if name not in ADVANTAGE_NAMES:
        user_function("algorithm.advantage", name, ADVANTAGE_NAMES)


def advantages_of(
    batch: StepBatch,  # rewards of all ranks; with kl_in_reward its old and reference logprobs
    algorithm: AlgorithmConfig,
    *,
    parts: Mapping[str, np.ndarray],  # function -> (P, G) score before its weight; read by gdpo
    weights: Mapping[str, np.ndarray],  # function -> (P,) weight, 0 where the function is not for the row
    kl_coef: float,  # the one of this step; read with kl_in_reward
    max_response_length: int,
) -> np.ndarray:
    """(P, G) float64 advantages; 0 where the reward is NaN."""
    lengths = _lengths(batch.groups, batch.rewards.shape)
    penalty = overlong_penalty(
        lengths,
        max_response_length=max_response_length,
        buffer=algorithm.overlong_buffer,
        factor=algorithm.overlong_penalty,
    )
    if algorithm.advantage == "gdpo":
        scores = dict(parts)
        if algorithm.overlong_buffer:
            scores["overlong"] = penalty
        # A response without a total (one of its functions failed) is unscored, whatever the other functions gave.
        stacked = [np.where(np.isnan(batch.rewards), np.nan, cells) for cells in scores.values()]
        of_row = [weights.get(name, np.ones(len(lengths))) for name in scores]
        return gdpo(np.stack(stacked, axis=2), weights=np.stack(of_row, axis=1), eps=algorithm.advantage_eps)
    shaped = batch.rewards + penalty
    if algorithm.kl_in_reward:
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None
        kl = KL_ESTIMATORS[algorithm.kl_estimator](batch.old_logprobs, batch.ref_logprobs).double().cpu().numpy()
        shaped = shaped - kl_coef * kl_per_response(kl, lengths.ravel()).reshape(lengths.shape)
    if algorithm.advantage == "pass_at_k":
        return pass_at_k(shaped, k=algorithm.pass_k, eps=algorithm.advantage_eps)
    return find_advantage(algorithm.advantage)(shaped, eps=algorithm.advantage_eps)


def _lengths(groups: list[Group], shape: tuple[int, ...]) -> np.ndarray:
    """(P, G) response tokens; 0 where a group has fewer responses than the largest."""
    lengths = np.zeros(shape, dtype=np.int64)
    for row, group in enumerate(groups):
        for column, response in enumerate(group.responses):
            lengths[row, column] = len(response.token_ids)
    return lengths
