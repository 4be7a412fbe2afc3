"""Section `lora`: train small matrices beside frozen weights, in place of the weights."""

from __future__ import annotations

from pydantic import Field, model_validator

from covey.config.scoring_models import ReferenceConfig
from covey.config.section import PositiveInt, Section


class LoraConfig(Section):
    """LoRA: the weights stay, and small matrices beside them are trained (docs/lora.md; extra `lora`)."""

    rank: PositiveInt | None = None
    """Rank of the matrices that are added to a layer; default: 16, or that of the adapter at `path`."""
    alpha: PositiveInt | None = None
    """What they add is multiplied by alpha / rank; default: 2 x rank, or that of the adapter at `path`."""
    target_modules: list[str] | None = Field(default=None, min_length=1)
    """Names of the linear layers they are added to, for example [q_proj, v_proj]; default: every linear layer of the
    decoder, or those of the adapter at `path`."""
    path: str | None = None
    """Adapter to start from: a directory that peft wrote, or its hub id; default: a new one, which adds 0 at first."""

    @model_validator(mode="after")
    def _sizes_of_a_new_one(self) -> LoraConfig:
        if self.path is None:
            self.rank = 16 if self.rank is None else self.rank
            self.alpha = 2 * self.rank if self.alpha is None else self.alpha
        return self


def check_reference(reference: ReferenceConfig, ref_path: str | None) -> None:
    """ValueError for settings of the reference that an adapter leaves no room for."""
    if reference.sync_every:
        raise ValueError(
            f"reference.sync_every={reference.sync_every} with lora: the policy is the base model with an adapter, "
            "which a reference does not have, so that it cannot follow; remove sync_every"
        )
    if reference.offload and ref_path is None:
        raise ValueError(
            "reference.offload=True with lora: the reference is the model that the policy runs on, there is no second "
            "copy to move; remove offload, or name another reference by model.ref_path"
        )
