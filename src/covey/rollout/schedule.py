"""Which responses are sampled together: cut groups into parts that fit, and form waves from the waiting parts.

The order is longest prompt first, so that prompts of similar length share a wave and little of its cache is padding.
Few large waves are better than many small ones, so nothing enters until a quarter of the places is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from covey.rollout.engine import Sampling
from covey.types import Prompt

_PAD_TOKENS = 32  # prompts this close in length share a wave, whatever the ratio
_PAD_SHARE = 0.25  # otherwise at most this share of a prompt's cache may be padding
_MANY_WAVES = 8  # with so many waves, wait for half of the places instead of a quarter


@dataclass(frozen=True)
class Part:
    """Samples [first, last) of the prompt at `index`: what enters at once. Usually the whole group.

    Example: Part(index=3, prompt=Prompt(...), first=0, last=8) with num_samples 8.
    """

    index: int
    prompt: Prompt
    first: int
    last: int

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt.input_ids)

    @property
    def count(self) -> int:
        """Responses."""
        return self.last - self.first


@dataclass(frozen=True)
class Limits:
    """What may run at the same time."""

    max_num_seqs: int  # responses
    kv_cache_bytes: int  # keys and values of all of them
    token_bytes: int  # keys and values of one token


def split(prompts: list[Prompt], sampling: Sampling, limits: Limits) -> Iterator[Part]:
    """Groups in descending order of prompt length, cut where one exceeds the places or the cache.

    A group that is cut runs its prompt once for every part. Raises ValueError for an empty prompt, and when a prompt
    with a single response does not fit.
    """
    room = limits.kv_cache_bytes // limits.token_bytes
    for index in sorted(range(len(prompts)), key=lambda i: -len(prompts[i].input_ids)):
        prompt = prompts[index]
        length = len(prompt.input_ids)
        if not length:
            raise ValueError(f"prompt {prompt.uid} has no tokens: drop the row or check the prompt template")
        fitting = (room - length) // sampling.max_response_length
        if fitting < 1:
            needed = (length + sampling.max_response_length) * limits.token_bytes
            raise ValueError(
                f"rollout.kv_cache_bytes is {limits.kv_cache_bytes}, but prompt {prompt.uid} ({length} tokens) with "
                f"one response of {sampling.max_response_length} tokens needs {needed}: raise it or allow fewer tokens"
            )
        size = min(sampling.num_samples, limits.max_num_seqs, fitting)
        for first in range(0, sampling.num_samples, size):
            yield Part(index, prompt, first, min(first + size, sampling.num_samples))


def admit(
    waiting: deque[Part],
    *,
    limits: Limits,
    num_waves: int,
    num_rows: int,
    reserved_bytes: int,
    max_response_length: int,
) -> list[list[Part]]:
    """Take from `waiting` what fits beside the running rows; one list of parts for each new wave."""
    places = limits.max_num_seqs - num_rows
    if num_rows and places * (4 if num_waves < _MANY_WAVES else 2) < limits.max_num_seqs:
        return []
    room = limits.kv_cache_bytes - reserved_bytes
    waves: list[list[Part]] = []
    while waiting:
        part = waiting[0]
        longest = waves[-1][0].length if waves else 0
        joins = bool(waves) and longest - part.length <= max(_PAD_TOKENS, _PAD_SHARE * longest)
        padded = longest if joins else part.length
        places -= part.count
        room -= (padded + part.count * max_response_length) * limits.token_bytes
        if places < 0 or room < 0:
            break
        if not joins:
            waves.append([])
        waves[-1].append(waiting.popleft())
    return waves
