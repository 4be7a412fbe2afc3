"""The records that travel through one training step, with shapes, units and a worked example each.

Shape letters used everywhere: P prompts, G responses per prompt, B = P * G responses, N response tokens (the
tokens that count in the loss), T packed tokens (what the model runs on), V vocabulary, H head dim, D width.

This module imports no torch: reward workers and `covey preprocess` read it too.

Canonical order. Every per-token vector of length N is group-major, then response-major, then position: the tokens of
group 0 response 0, group 0 response 1, ..., group 1 response 0, ... Masks come from lengths, never from token values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """One question, ready for the model.

    Example: Prompt(uid=17, input_ids=[12, 5, 9], text="2+2=", row={"problem": "2+2=", "answer": "4", "task": "math"})
    """

    uid: int  # position in the run's stream of prompts; unique, seeds the sampling of its responses
    input_ids: list[int]  # at least one token
    text: str
    row: dict[str, Any] = field(default_factory=dict)  # every raw column, plus "prompt" and "response" (reference)


@dataclass
class Response:
    """One sampled answer. A stop token, when one ended it, is the last id and counts in the loss.

    Example: Response(token_ids=[4, 2], logprobs=[-0.7, -0.01], text="4", finish_reason="stop")
    """

    token_ids: list[int]
    logprobs: list[float]  # of the distribution that was sampled from (temperature, top-k/p, min-p applied), nats
    text: str = ""  # without the stop token and other special tokens
    finish_reason: FinishReason = "stop"
    num_kept: list[int] | None = None  # per token, how many tokens top-k/top-p/min-p kept; None: all of them
    policy_version: int = 0  # optimizer steps the sampling weights had seen


@dataclass
class Group:
    """A prompt and its G responses."""

    prompt: Prompt
    responses: list[Response]


@dataclass
class StepBatch:
    """What one rollout hands to the update. Vectors (N,) are in canonical order, fp32, on the policy's device."""

    groups: list[Group]  # P of them
    rewards: np.ndarray  # (P, G) float64; NaN where no reward function could score the response
    advantages: np.ndarray  # (P, G) float64; 0 where the reward is NaN
    old_logprobs: Tensor | None = None  # (N,) under the policy that starts the update; None: equal to the current ones
    ref_logprobs: Tensor | None = None  # (N,) under the reference; None when kl_coef is 0
    teacher_logprobs: Tensor | None = None  # (N,) under the teacher; None without distillation


@dataclass
class Segment:
    """Rows [start, end) of a packed batch that form a prompt, or a response that continues the prompt at `prompt`.

    Example (P=3, responses of 3 and 2 tokens, packed as p p p a a b):
    Segment(0, 3, None), Segment(3, 5, prompt=0), Segment(5, 6, prompt=0)
    """

    start: int
    end: int
    prompt: int | None  # index of the prompt's segment in the same list; None: this segment is a prompt


@dataclass
class PackedBatch:
    """One micro-batch: prompts once each, followed by their responses without the last token; no padding.

    Example: prompt [5, 6, 7], responses [1, 2, 3] and [8, 9]:
      input_ids    [5 6 7 1 2 8]      position_ids [0 1 2 3 4 3]
      target_rows  [2 3 4 2 5]        target_ids   [1 2 3 8 9]      response_index [0 0 0 1 1]
    """

    input_ids: Tensor  # (T,) int64
    position_ids: Tensor  # (T,) int64, restart after the prompt for every response
    segments: list[Segment]
    target_rows: Tensor  # (n,) int64, row of the hidden states that predicts each response token
    target_ids: Tensor  # (n,) int64, the response tokens
    token_index: Tensor  # (n,) int64, where each response token stands in the step's canonical order
    response_index: Tensor  # (n,) int64, 0..num_responses-1 within this micro-batch
    response_ids: list[int]  # for each of them, p * G + g in the step
    num_tokens: int  # T
    num_kept: Tensor | None = None  # (n,) int64, tokens that the sampler's filters kept; None: no filter was on


@dataclass
class StepStats:
    """What an update reports. Sums and counts, so that micro-batches and ranks add up before any division."""

    values: dict[str, float] = field(default_factory=dict)
