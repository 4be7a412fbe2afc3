"""From token losses to one number: the loss of an optimizer step is sum(token loss * weight of its token).

The weights depend on the lengths of all responses of the optimizer step, on all ranks, and on nothing else. So the
gradient does not depend on how the step was cut into micro-batches, packed, or spread over devices; each rank sums
its own tokens and the gradients are summed (not averaged) over ranks.
"""

from __future__ import annotations

import numpy as np

AGGREGATIONS = ("token_mean", "sequence_mean", "constant", "sequence_sum")


def token_weights(
    lengths: np.ndarray,  # (B,) response tokens that count, of every response of the optimizer step
    included: np.ndarray,  # (B,) bool; False: the response is masked (truncated), its tokens leave the loss
    kind: str,
    *,
    num_responses: int,
    max_response_length: int,
) -> np.ndarray:
    """(B,) float64: the weight of each token of response b in the loss sum.

    | kind | weight | source |
    |---|---|---|
    | token_mean | 1 / tokens of all included responses | DAPO, arXiv:2503.14476 eq. 8 |
    | sequence_mean | 1 / (num_responses * tokens of b) | GRPO, arXiv:2402.03300 eq. 3 |
    | constant | 1 / (num_responses * max_response_length) | Dr.GRPO, arXiv:2503.20783 sec. 3.2 |
    | sequence_sum | 1 / num_responses | LUSPO, arXiv:2602.05261 |

    A response that is not included has weight 0. Its tokens leave the denominator of token_mean; it is still one of
    num_responses in the other three (as in TRL 1.16), so masking it does not raise the weight of the others. Without
    a single included token every weight is 0: the loss is 0, not 0 / 0.
    Raises ValueError for an unknown kind.
    """
    counts = np.where(included, lengths, 0).astype(np.float64)
    present = counts > 0
    if kind == "token_mean":
        weights = np.full(counts.shape, 1.0 / max(counts.sum(), 1.0))
    elif kind == "sequence_mean":
        weights = 1.0 / (num_responses * np.maximum(counts, 1.0))
    elif kind == "constant":
        weights = np.full(counts.shape, 1.0 / (num_responses * max_response_length))
    elif kind == "sequence_sum":
        weights = np.full(counts.shape, 1.0 / num_responses)
    else:
        raise ValueError(f"algorithm.aggregation={kind!r} is unknown; known: {', '.join(AGGREGATIONS)}")
    return np.where(present, weights, 0.0)
