"""Draw one token per row from logits by inverse CDF, and the uniform numbers that drive it.

Every response has its own counter-based stream (Philox 4x64: key = (seed, step), counter = (0, sample, uid, 0)), and
the number at place j of the stream decides token j. What is drawn therefore depends neither on which rows happen to be
in the batch nor on the device; equal logits give equal tokens.

The log-probability returned is that of the distribution the token was drawn from: temperature first, then top-k, then
top-p inside what top-k kept, then min-p relative to the most likely token, renormalised. All three filters keep a
prefix of the tokens in descending order of probability, so the size of the kept set describes it. Temperature 0 is the
point mass on the most likely token: its log-probability is 0.

Left out: penalties, bad words, beam search.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from covey.rollout.engine import Sampling

_WORD = 2**64 - 1
_BELOW_ONE = 1.0 - 2.0**-24  # the largest number below 1 in fp32
_BLOCK = 512  # tokens summed in one block of the two-level search
_FIRST_LOOK = 128  # sorted candidates looked at before a row is sorted in full


class Draw(NamedTuple):
    """One token per row."""

    token_ids: Tensor  # (S,) int64
    logprobs: Tensor  # (S,) fp32, nats
    num_kept: Tensor | None  # (S,) int64, size of the kept set; None when no filter is active


def uniforms(sampling: Sampling, *, uid: int, sample: int) -> np.ndarray:
    """The (max_response_length,) fp32 numbers in [0, 1) that decide the tokens of one response.

    Raw 64-bit words of the stream, upper 24 bits: numpy keeps these stable between versions, unlike its distributions.
    """
    key = np.array([sampling.seed & _WORD, sampling.step & _WORD], dtype=np.uint64)
    counter = np.array([0, sample, uid & _WORD, 0], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(sampling.max_response_length)
    return (words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def draw(
    logits: Tensor,  # (S, V) any float type
    uniform: Tensor,  # (S,) fp32 in [0, 1)
    sampling: Sampling,
) -> Draw:
    """Sample one token per row of `logits`."""
    if sampling.temperature == 0:
        token_ids = logits.argmax(-1)
        return Draw(token_ids, torch.zeros_like(token_ids, dtype=torch.float32), None)
    logits = logits.float()
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
        return _draw_filtered(logits, uniform, sampling)
    return _draw_full(logits, uniform)


def _draw_full(logits: Tensor, uniform: Tensor) -> Draw:
    """Inverse CDF over the whole vocabulary; a large one in two levels: find the block, then the token in it.

    Sums of blocks are vectorised where a running sum over V is not, and short sums round less.
    """
    probs = logits.softmax(-1)
    if probs.shape[1] <= 2 * _BLOCK:
        place = _invert(probs, uniform.unsqueeze(1))
        return Draw(place.squeeze(1), probs.gather(1, place).squeeze(1).log_(), None)
    size = math.gcd(probs.shape[1], _BLOCK)
    if size < 32:
        size = _BLOCK
        probs = pad(probs, (0, -probs.shape[1] % size))
    blocks = probs.view(len(probs), -1, size)
    mass = blocks.sum(-1)
    upper = mass.cumsum(-1)
    target = (uniform * upper[:, -1]).unsqueeze(1)
    block = _count_not_above(upper, target)
    block_mass = mass.gather(1, block)
    # where in its block the target lies, as a fraction: rounding must never push it out of the block
    fraction = ((target - upper.gather(1, block) + block_mass) / block_mass).clamp_(0.0, _BELOW_ONE)
    inside = blocks.gather(1, block.unsqueeze(2).expand(-1, -1, size)).squeeze(1)
    within = _invert(inside, fraction)
    token_ids = block * size + within
    logprobs = (inside.gather(1, within) / upper[:, -1:]).log_()
    return Draw(token_ids.squeeze(1), logprobs.squeeze(1), None)


def _draw_filtered(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Draw:
    """Look at the most likely tokens first; sort a row in full only when its kept set is not closed among them."""
    vocab = logits.shape[1]
    limit = min(sampling.top_k or vocab, vocab)
    log_total = logits.logsumexp(-1, keepdim=True)
    look = limit if sampling.top_k else min(limit, _FIRST_LOOK)
    values, ids = logits.topk(look, dim=-1)
    kept, closed = _kept_prefix(values, log_total, sampling, whole=look == limit)
    result = _draw_prefix(values, ids, kept, uniform)
    if look == limit:
        return result
    open_rows = (~closed).cpu().numpy()
    if not open_rows.any():
        return result
    rows = torch.from_numpy(open_rows.nonzero()[0]).to(logits.device)
    values, ids = logits.index_select(0, rows).topk(limit, dim=-1)
    kept, _ = _kept_prefix(values, log_total.index_select(0, rows), sampling, whole=True)
    again = _draw_prefix(values, ids, kept, uniform.index_select(0, rows))
    # An open row takes its place in `again`, which stands behind the others.
    places = np.where(open_rows, len(open_rows) + open_rows.cumsum() - 1, np.arange(len(open_rows)))
    chosen = torch.from_numpy(places).to(logits.device)
    merged = (torch.cat(pair).index_select(0, chosen) for pair in zip(result, again, strict=True))  # type: ignore[arg-type]
    return Draw(*merged)


def _kept_prefix(values: Tensor, log_total: Tensor, sampling: Sampling, *, whole: bool) -> tuple[Tensor, Tensor]:
    """(kept, closed), both (S,): how many of the sorted candidates stay, and whether a larger look could keep more.

    `values` (S, K) are the K largest logits in descending order; `whole` says that they are all that top-k allows.
    """
    probs = (values - log_total).exp_()
    keep = torch.ones_like(probs, dtype=torch.bool)
    if sampling.min_p > 0:
        keep &= probs >= sampling.min_p * probs[:, :1]
    if sampling.top_p < 1:
        # top-p counts against the mass that top-k kept; without top-k that is everything, seen or not
        mass = probs.cumsum(-1)
        total = mass[:, -1:] if whole else torch.ones_like(log_total)
        keep &= (mass - probs) < sampling.top_p * total
    keep[:, 0] = True
    kept = keep.sum(-1)
    return kept, kept < values.shape[1]


def _draw_prefix(values: Tensor, ids: Tensor, kept: Tensor, uniform: Tensor) -> Draw:
    """Inverse CDF over the first `kept` of the sorted candidates."""
    rank = torch.arange(values.shape[1], device=values.device)
    probs = values.masked_fill(rank >= kept.unsqueeze(1), -torch.inf).softmax(-1)
    place = _invert(probs, uniform.unsqueeze(1))
    return Draw(ids.gather(1, place).squeeze(1), probs.gather(1, place).squeeze(1).log_(), kept)


def _invert(weights: Tensor, fraction: Tensor) -> Tensor:
    """(S, 1) index where the running sum of `weights` (S, K) passes `fraction` (S, 1) of its total."""
    upper = weights.cumsum(-1)
    return _count_not_above(upper, fraction * upper[:, -1:])


def _count_not_above(upper: Tensor, target: Tensor) -> Tensor:
    """(S, 1) first index with upper > target; the clamp is for NaN rows only, which fail later with their position."""
    return (upper <= target).sum(-1, keepdim=True).clamp_(max=upper.shape[1] - 1)
