"""The settings of the models that only score: sections `reference` and `distillation`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from covey.config.section import NonNegativeInt, Probability, Section


class ReferenceConfig(Section):
    """How the reference of the KL term follows the policy. Its weights: model.ref_path."""

    sync_every: NonNegativeInt = 0
    """Every so many steps the reference moves to the policy's weights; 0: it stays what it was."""
    decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of its weights that it keeps then: decay x reference + (1 - decay) x policy; 0: it becomes the policy."""
    offload: bool = False
    """Keep its weights in host memory and move them to the device for its forward pass; nothing to gain on cpu."""

    @model_validator(mode="after")
    def _decay_needs_a_sync(self) -> ReferenceConfig:
        if self.decay and not self.sync_every:
            raise ValueError(
                f"decay={self.decay} has no effect with sync_every=0: set sync_every (1: an average of every step)"
            )
        return self


class DistillationConfig(Section):
    """On-policy distillation: a teacher scores the policy's own responses, token by token (docs/math.md)."""

    teacher: str
    """Hugging Face directory or hub id of the teacher; it must share the policy's vocabulary."""
    coef: Annotated[float, Field(gt=0.0)] = 1.0
    """Weight of the advantage log p_teacher - log p of a token, which is added to that of the rewards."""
    discount: Probability = 0.0
    """How much a token answers for what follows it: weight of the next token's advantage in its own; 0: not at all."""
    offload: bool = False
    """Keep the teacher's weights in host memory between uses, as reference.offload."""
