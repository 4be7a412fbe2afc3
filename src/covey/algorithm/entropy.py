"""The weight of an entropy bonus that holds the policy's entropy at a target from below.

Source: Skywork-OR1, arXiv:2505.22312 sec. 4 (adaptive entropy control); TRL's `use_adaptive_entropy`, which moves the
weight after every optimizer step, here after every step of a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class EntropyController:
    """After each step: coef + delta where the mean entropy was at most the target, else coef - delta, in [0, largest].

    The bonus itself is on only while the entropy measured last was at most the target.
    Example: EntropyController(coef=0.01, target=0.5, delta=0.005, largest=1.0).update(0.4) has coef and weight 0.015,
    and its update(0.6) has coef 0.01 and weight 0.
    """

    coef: float
    target: float  # nats per token
    delta: float
    largest: float
    measured: float | None = None  # mean entropy of the step before; None, before the first: no bonus yet

    @property
    def weight(self) -> float:
        """What the bonus is multiplied by in the coming step."""
        return self.coef if self.measured is not None and self.measured <= self.target else 0.0

    def update(self, entropy: float) -> EntropyController:
        """The controller after a step with this mean entropy per token; one that is not finite changes nothing."""
        if not math.isfinite(entropy):
            return self
        step = self.delta if entropy <= self.target else -self.delta
        return replace(self, coef=min(max(self.coef + step, 0.0), self.largest), measured=entropy)
