"""What every rollout engine does: the Protocol, and the sampling request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from covey.types import Group, Prompt

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How to sample. The draw for a token depends only on (seed, step, prompt.uid, sample, position)."""

    num_samples: int  # G
    max_response_length: int  # tokens
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    step: int = 0  # training step; evaluation uses its own, negative numbers


class RolloutEngine(Protocol):
    """Samples responses with the newest weights it was given."""

    def generate(
        self, prompts: list[Prompt], sampling: Sampling, *, on_group: Callable[[int, Group], None] | None = None
    ) -> list[Group]:
        """G responses for each prompt, in the order of `prompts`; on_group(index, group) as soon as one is complete."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Take over the policy's weights (Hugging Face names). `version` is stamped on the responses."""
        ...
