"""KL to a reference, per sampled token, and the controllers of its coefficient.

With d = ref_logprobs - logprobs at a token sampled from the policy, the mean over tokens of each estimator approaches
KL(policy || ref). Source: J. Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html.

As a term of the loss the estimators differ in their gradient: on policy, k2's has the expectation of the KL's own
gradient, k1's has expectation 0 (it penalises nothing), and k3's is unbiased only when multiplied by the importance
ratio (`importance_weighted`; TRL's `use_bias_correction_kl`). In the reward (no gradient) k1 is unbiased.

A log-ratio that is not finite gives a KL of 0; beyond +-20 it is held there, so that the exponential stays finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(n,) -d: unbiased, may be negative. MindSpeed-RL's `kl`."""
    return -_log_ratio(logprobs, ref_logprobs)


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(n,) d^2 / 2: biased, low variance. MindSpeed-RL's `mse`."""
    return 0.5 * _log_ratio(logprobs, ref_logprobs).square()


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(n,) exp(d) - d - 1: unbiased, never negative. GRPO, arXiv:2402.03300 eq. 4."""
    log_ratio = _log_ratio(logprobs, ref_logprobs)
    return torch.exp(log_ratio) - log_ratio - 1.0


def low_var_kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(n,) k3 held within +-10, as MindSpeed-RL's `low_var_kl` (mindspeed_rl/utils/compute.py).

    Example: logprob 0.5 and ref 1.0 give 0.1487212.
    """
    return k3(logprobs, ref_logprobs).clamp(-10.0, 10.0)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": low_var_kl}


@dataclass(frozen=True)
class KlController:
    """The KL coefficient of the next step.

    With `target` None it stays; else it grows while the measured KL is above the target and shrinks below it,
    by at most 20 % of num_responses / horizon a step. Source: arXiv:1909.08593 sec. 2.2 (proportional controller).
    Example: KlController(coef=1.0, target=0.1, horizon=100).update(kl=0.2, num_responses=50).coef is 1.1.
    """

    coef: float
    target: float | None = None  # mean KL per token, nats
    horizon: int = 10_000  # responses

    def update(self, *, kl: float, num_responses: int) -> KlController:
        """The controller after a step with this mean KL; a KL that is not finite changes nothing."""
        if self.target is None or not abs(kl) < float("inf"):
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        coef = self.coef * (1.0 + error * num_responses / self.horizon)
        return KlController(coef=coef, target=self.target, horizon=self.horizon)


def _log_ratio(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(n,) ref - policy, 0 where not finite. The selection comes first, so that no gradient passes a bad token."""
    finite = torch.isfinite(logprobs) & torch.isfinite(ref_logprobs)
    log_ratio = torch.where(finite, ref_logprobs, 0.0) - torch.where(finite, logprobs, 0.0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
