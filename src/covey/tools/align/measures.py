"""How far two tensors are apart, and how far they may be: the tolerance profiles.

Sources. fp32: rounding of other kernels and other orders of sums. bf16: 8 bits of mantissa, 2^-9 a rounding, which adds
up over layers as a random walk (sqrt of the depth). bf16-npu adds the gates that verl and MindSpeed-RL publish for
Ascend against GPU: mean |difference of log-probabilities| 0.01, no bias over 0.002, loss and gradient norm within 2 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Measure:
    """Distances of B from A, in float64."""

    cosine: float
    max_abs: float
    relative_l2: float  # |B - A| / |A|
    norm_ratio: float  # |B| / |A|
    worst_row: float = 0.0  # largest |B - A| of a row, relative to the mean size of A's rows

    @property
    def finite(self) -> bool:
        """False where a NaN or infinity is in one of the two."""
        return all(map(math.isfinite, (self.cosine, self.max_abs, self.relative_l2)))


def measure(a: Tensor, b: Tensor) -> Measure:
    """Of two tensors of one shape; rows are along the first axis. Two zeros are equal."""
    if not a.numel():
        return Measure(1.0, 0.0, 0.0, 1.0)
    x, y = a.double().reshape(len(a), -1) if a.dim() else a.double().reshape(1, 1), b.double()
    y = y.reshape(x.shape)
    apart, size, other = float((y - x).norm()), float(x.norm()), float(y.norm())
    if apart == 0 and size == 0:
        return Measure(1.0, 0.0, 0.0, 1.0)
    cosine = min(1.0, float((x * y).sum()) / (size * other)) if size * other else 0.0
    typical = size / math.sqrt(len(x))
    worst = float((y - x).norm(dim=1).max())
    return Measure(
        cosine=cosine,
        max_abs=float((y - x).abs().max()),
        relative_l2=apart / size if size else math.inf,
        norm_ratio=other / size if size else math.inf,
        worst_row=worst / typical if typical else math.inf,
    )


@dataclass(frozen=True)
class Profile:
    """Largest allowed differences of B from A."""

    name: str
    activation: float  # relative L2 at the first layer; grows with sqrt(1 + layer)
    worst_row: float  # times that, for the worst single row
    logprob_mean: float  # nats, mean |difference| over tokens
    logprob_max: float  # nats, any token
    logprob_bias: float  # nats, |mean difference|
    loss_relative: float
    loss_absolute: float  # the loss of an on-policy step is about 0: then this one counts
    gradient: float  # relative L2 of the kept rows, and of the norm
    update: float  # 1 - cosine of all moved weights together; a first Adam step is the sign of the gradient

    def activations(self, depth: int) -> float:
        """Relative L2 allowed after `depth` layers."""
        return self.activation * math.sqrt(1 + depth)


PROFILES = {
    "fp32": Profile("fp32", 2e-5, 10, 2e-5, 1e-3, 1e-5, 1e-4, 1e-5, 2e-4, 1e-3),
    "bf16": Profile("bf16", 2e-2, 10, 1e-2, 1.0, 2e-3, 2e-2, 1e-2, 1e-1, 1e-1),
    "bf16-npu": Profile("bf16-npu", 3e-2, 10, 1e-2, 1.0, 2e-3, 2e-2, 1e-2, 2e-1, 2e-1),
}


def profile_named(name: str) -> Profile:
    """ValueError for an unknown one."""
    if name not in PROFILES:
        raise ValueError(f"--profile {name}: known are {', '.join(PROFILES)}")
    return PROFILES[name]
