"""The coefficients that a run steers (KL and entropy), and the objective that they are part of.

`kl_target` and `entropy_target` change a coefficient after each step by what was measured in it. The state is two
numbers and a measurement; a checkpoint keeps it, so that a resumed run goes on exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from covey.algorithm.entropy import EntropyController
from covey.algorithm.kl import KlController
from covey.algorithm.losses import LossOptions, find_loss
from covey.algorithm.objective import Objective
from covey.config.algorithm import AlgorithmConfig
from covey.config.scoring_models import DistillationConfig


class Steering:
    """Where the coefficients stand. Before the first step, and for those without a target: as configured."""

    def __init__(self) -> None:
        self._kl_coef: float | None = None
        self._entropy: EntropyController | None = None

    def kl_coef(self, algorithm: AlgorithmConfig) -> float:
        """The KL coefficient of this step."""
        return algorithm.kl_coef if self._kl_coef is None else self._kl_coef

    def entropy_coef(self, algorithm: AlgorithmConfig) -> float:
        """The weight of the entropy bonus in this step; 0 while the entropy is above entropy_target."""
        return algorithm.entropy_coef if algorithm.entropy_target is None else self._controller(algorithm).weight

    def objective(self, algorithm: AlgorithmConfig, distillation: DistillationConfig | None) -> Objective:
        """What this step minimises."""
        return Objective(
            loss=find_loss(algorithm.loss),
            options=LossOptions(
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
                dual_clip=algorithm.dual_clip,
                sequence_ratio=algorithm.sequence_ratio,
                sapo_temperature_pos=algorithm.sapo_temperature_pos,
                sapo_temperature_neg=algorithm.sapo_temperature_neg,
                vespo_pos=algorithm.vespo_pos,
                vespo_neg=algorithm.vespo_neg,
            ),
            kl_coef=0.0 if algorithm.kl_in_reward else self.kl_coef(algorithm),
            kl_estimator=algorithm.kl_estimator,
            kl_importance_weighted=algorithm.kl_importance_weighted,
            entropy_coef=self.entropy_coef(algorithm),
            rollout_correction=None if algorithm.rollout_correction == "none" else algorithm.rollout_correction,
            rollout_ratio_low=algorithm.rollout_ratio_low,
            rollout_ratio_high=algorithm.rollout_ratio_high,
            off_policy_max_kl=algorithm.off_policy_max_kl,
            distill_coef=0.0 if distillation is None else distillation.coef,
            distill_discount=0.0 if distillation is None else distillation.discount,
        )

    def after_step(
        self, algorithm: AlgorithmConfig, measured: Mapping[str, float], *, num_responses: int
    ) -> dict[str, float]:
        """Move the coefficients by a step's metrics; returns those that the step had, to be reported."""
        used: dict[str, float] = {}
        if "actor/kl_loss" in measured:
            used["actor/kl_coef"] = self.kl_coef(algorithm)
            if algorithm.kl_target is not None:
                now = KlController(self.kl_coef(algorithm), target=algorithm.kl_target, horizon=algorithm.kl_horizon)
                self._kl_coef = now.update(kl=measured["actor/kl_loss"], num_responses=num_responses).coef
        if algorithm.entropy_target is not None and "actor/entropy" in measured:
            used["actor/entropy_coef"] = self.entropy_coef(algorithm)
            self._entropy = self._controller(algorithm).update(measured["actor/entropy"])
        return used

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON."""
        entropy = None if self._entropy is None else [self._entropy.coef, self._entropy.measured]
        return {"kl_coef": self._kl_coef, "entropy": entropy}

    def load_state_dict(self, state: Mapping[str, Any], algorithm: AlgorithmConfig) -> None:
        """Go on from a state; a coefficient that is no longer steered is the configured one."""
        self._kl_coef = state["kl_coef"] if algorithm.kl_target is not None else None
        self._entropy = None
        if state["entropy"] is not None and algorithm.entropy_target is not None:
            coef, measured = state["entropy"]
            self._entropy = replace(self._controller(algorithm), coef=coef, measured=measured)

    def _controller(self, algorithm: AlgorithmConfig) -> EntropyController:
        if self._entropy is not None:
            return self._entropy
        assert algorithm.entropy_target is not None
        return EntropyController(
            algorithm.entropy_coef,
            target=algorithm.entropy_target,
            delta=algorithm.entropy_coef_delta,
            largest=algorithm.entropy_coef_max,
        )
