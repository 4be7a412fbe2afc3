"""What is added to rewards before the advantages: a penalty for length, and the KL to the reference."""

from __future__ import annotations

import numpy as np


def overlong_penalty(
    lengths: np.ndarray,  # (...) response tokens
    *,
    max_response_length: int,
    buffer: int,
    factor: float,
) -> np.ndarray:
    """Same shape, float64, in [-factor, 0]: 0 up to max_response_length - buffer, then linear down to -factor.

    Source: soft overlong punishment, DAPO, arXiv:2503.14476 eq. 13 (factor 1). `buffer` 0 means no penalty.
    Example: max_response_length 10, buffer 4, factor 1: lengths 6, 8, 10 give 0, -0.5, -1.
    """
    if buffer == 0:
        return np.zeros(np.shape(lengths))
    over = np.asarray(lengths, dtype=np.float64) - (max_response_length - buffer)
    return -factor * np.clip(over / buffer, 0.0, 1.0)


def kl_per_response(
    kl: np.ndarray,  # (N,) KL estimate per token, canonical order
    lengths: np.ndarray,  # (B,) tokens of each response, summing to N
) -> np.ndarray:
    """(B,) float64 sum over each response's tokens, to be subtracted from its reward times kl_coef.

    Source: KL in the reward, arXiv:1909.08593 eq. 2, arXiv:2402.14740 sec. 2 (with the k1 estimator). The whole
    response shares it; REINFORCE++ (arXiv:2501.03262) gives a token only the KL of the tokens after it.
    """
    ends = np.cumsum(lengths)
    running = np.concatenate([[0.0], np.cumsum(np.asarray(kl, dtype=np.float64))])
    return running[ends] - running[ends - lengths]
