"""The settings of the objective: section `algorithm`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from covey.config.presets import with_preset
from covey.config.section import NonNegative, NonNegativeInt, PositiveInt, Section


class AlgorithmConfig(Section):
    """The objective."""

    preset: (
        Literal[
            "grpo",
            "dapo",
            "dr_grpo",
            "gspo",
            "gspo_token",
            "luspo",
            "cispo",
            "sapo",
            "vespo",
            "reinforce",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
        ]
        | None
    ) = None
    """Named set of the keys below (docs/math.md); a key given beside it wins."""
    loss: str = "grpo"
    """Loss per token: grpo, gspo, gspo_token, cispo, sapo, rloo, reinforce, vespo, or "module:function"."""
    advantage: str = "group_norm"
    """How rewards become advantages: group_norm, group_center, rloo, batch_norm, batch_std, group_center_batch_norm,
    pass_at_k, gdpo, or "module:function" (docs/math.md)."""
    pass_k: PositiveInt = 2
    """The k of advantage pass_at_k."""
    advantage_eps: NonNegative = 1e-6
    """Added to the standard deviation (MindSpeed-RL 1e-6, TRL 1e-4)."""
    aggregation: Literal["token_mean", "sequence_mean", "constant", "sequence_sum"] = "token_mean"
    """Weight of a token in the loss; denominators are counted over the whole optimizer step."""
    clip_low: NonNegative = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: NonNegative = 0.2
    """The ratio is clipped at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Upper limit of the ratio, also where the advantage is negative (grpo, gspo, gspo_token, rloo); null: none."""
    sequence_ratio: bool = False
    """One importance ratio for a response, exp(mean log-ratio), instead of one for each token (grpo, cispo, sapo)."""
    sapo_temperature_pos: Annotated[float, Field(gt=0.0)] = 1.0
    """Steepness of the gate of loss sapo where the advantage is positive."""
    sapo_temperature_neg: Annotated[float, Field(gt=0.0)] = 1.05
    """Steepness of the gate of loss sapo elsewhere."""
    vespo_pos: tuple[NonNegative, NonNegative] = (2.0, 3.0)
    """Power and rate of the weight of loss vespo where the advantage is not negative."""
    vespo_neg: tuple[NonNegative, NonNegative] = (3.0, 2.0)
    """Power and rate of the weight of loss vespo where the advantage is negative."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL term to the reference; 0: the reference is not loaded."""
    kl_estimator: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """Estimator of the KL term."""
    kl_in_reward: bool = False
    """Subtract kl_coef times the response's summed KL from its reward, instead of a KL term in the loss."""
    kl_importance_weighted: bool = False
    """Multiply the KL term by the importance ratio: makes the gradient of k3 unbiased."""
    kl_target: Annotated[float, Field(gt=0.0)] | None = None
    """Mean KL per token, nats, that kl_coef is steered to after every step; null: kl_coef is fixed."""
    kl_horizon: PositiveInt = 10_000
    """Responses over which kl_coef changes by at most 20 % (with kl_target)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; with entropy_target, the one to start from."""
    entropy_target: Annotated[float, Field(gt=0.0)] | None = None
    """Mean entropy per token, nats, below which the bonus is on and its weight grows, and above which it is off and the
    weight shrinks (docs/math.md); null: entropy_coef is fixed."""
    entropy_coef_delta: Annotated[float, Field(gt=0.0)] = 0.005
    """How much the weight changes in a step (with entropy_target)."""
    entropy_coef_max: Annotated[float, Field(gt=0.0)] = 1.0
    """Largest weight (with entropy_target); the smallest is 0."""
    top_entropy_share: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of tokens, those of highest entropy, that the policy loss counts; below 1 costs one more forward pass."""
    rollout_correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
    ] = "none"
    """Importance weight for rollout logprobs that differ from training's: held at its bounds, or 0 outside them."""
    rollout_ratio_high: Annotated[float, Field(gt=0.0)] = 2.0
    """Upper bound of that weight."""
    rollout_ratio_low: NonNegative | None = None
    """Lower bound of that weight; null: none."""
    off_policy_max_kl: NonNegative | None = None
    """Leave out responses with negative advantage whose mean rollout - current logprob is over this; null: none."""
    sampling_consistent: bool = False
    """Renormalise training logprobs over the tokens that top_k, top_p and min_p kept, so that they are comparable with
    the rollout's; else they are of the whole vocabulary."""
    mask_truncated: bool = False
    """Leave responses that hit max_response_length out of the loss (their reward still counts in the group)."""
    overlong_buffer: NonNegativeInt = 0
    """Last tokens before max_response_length over which a penalty grows from 0 to overlong_penalty; 0: none."""
    overlong_penalty: NonNegative = 1.0
    """Subtracted from the reward of a response of full length (with overlong_buffer)."""
    max_rounds: PositiveInt = 1
    """Rollouts per step at most, to replace groups whose rewards are all equal (dynamic sampling); 1: none replaced."""
    epochs: PositiveInt = 1
    """Passes over each rollout."""
    mini_batch_size: PositiveInt | None = None
    """Prompts per optimizer step; default: train.batch_size, one optimizer step per epoch."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, value: Any) -> Any:
        return with_preset(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> AlgorithmConfig:
        effects = (
            ("dual_clip", self.dual_clip is not None, "loss", ("grpo", "gspo", "gspo_token", "rloo")),
            ("sequence_ratio", self.sequence_ratio, "loss", ("grpo", "cispo", "sapo")),
        )
        for key, given, other, readers in effects:
            if given and ":" not in self.loss and self.loss not in readers:
                raise ValueError(
                    f"{key}={getattr(self, key)} has no effect with {other}={self.loss}: "
                    f"only {', '.join(readers)} read it; remove {key} or change {other}"
                )
        if self.kl_target is not None and not self.kl_coef:
            raise ValueError(f"kl_target={self.kl_target} with kl_coef=0: give kl_coef a value to start from")
        if self.entropy_target is not None and not 0.0 <= self.entropy_coef <= self.entropy_coef_max:
            raise ValueError(
                f"entropy_coef={self.entropy_coef} with entropy_target={self.entropy_target}: the weight starts there "
                f"and stays between 0 and entropy_coef_max={self.entropy_coef_max}; choose one between"
            )
        if self.kl_in_reward and (not self.kl_coef or self.kl_importance_weighted or self.advantage == "gdpo"):
            raise ValueError(
                f"kl_in_reward=True with kl_coef={self.kl_coef}, kl_importance_weighted={self.kl_importance_weighted}, "
                f"advantage={self.advantage}: it needs a kl_coef above 0, no importance weight, and not gdpo"
            )
        if self.rollout_ratio_low is not None and self.rollout_correction == "none":
            raise ValueError(
                f"rollout_ratio_low={self.rollout_ratio_low} has no effect with rollout_correction=none: "
                "choose a rollout_correction"
            )
        return self
