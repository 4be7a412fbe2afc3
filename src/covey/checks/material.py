"""What the checks before the first step look at, put together from a configuration or from a run that is starting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from covey import device as devices
from covey.config.schema import Config, RewardEntry
from covey.data.load import is_preprocessed
from covey.data.manifest import find_manifest, read_manifest
from covey.distributed.mesh import Mesh, resolve_degrees, world_size
from covey.models.load import load_skeleton, load_tokenizer, stop_ids
from covey.rewards.runner import Scorer
from covey.rollout.reward_model import NAME as REWARD_MODEL
from covey.setup import Parts, Prompts, attach_adapter, load_prompts
from covey.types import Prompt

T = TypeVar("T")
SAMPLE = 16  # rows that checks look at


@dataclass
class Material:
    """A run's parts. None: it could not be had, `missing` says why, and checks that need it are skipped."""

    config: Config
    mesh: Mesh | None = None  # the layout; its processes need not run
    device: devices.Device | None = None
    model: Any = None  # shapes and config as the checkpoint's config.json has them, on the meta device
    network: Any = None  # the loaded model, in a run; perhaps cut and sharded
    tokenizer: Any = None
    prompts: Prompts | None = None
    scorer: Scorer | None = None
    trained_model: Any = None  # `model` with the adapter, if there is one; the model that gets gradients
    teacher: Any = None  # shapes of distillation's teacher
    missing: dict[str, str] = field(default_factory=dict)

    def sample(self) -> list[Prompt]:
        """Some training prompts, from the first to the last."""
        assert self.prompts is not None
        train = self.prompts.train
        places = np.unique(np.linspace(0, len(train) - 1, min(SAMPLE, len(train))).astype(int))
        return [train[int(i)] for i in places]

    def manifests(self) -> dict[str, dict[str, Any]]:
        """Source of training data -> its manifest, where `covey preprocess` made it."""
        train = self.config.data.train
        found = {source: find_manifest(source) for source in ([train] if isinstance(train, str) else train)}
        return {source: read_manifest(path) for source, path in found.items() if path is not None}

    def stop_ids(self) -> list[int]:
        """Ids that end a response in this run; ValueError when there is none."""
        template = self.prompts.train.stop_token_ids if self.prompts is not None else []
        return stop_ids(self.model, self.tokenizer, extra=[*self.config.rollout.stop_token_ids, *template])

    def close(self) -> None:
        """End reward workers that `gather` started."""
        if self.scorer is not None:
            self.scorer.close()


def gather(config: Config) -> Material:
    """The material of a configuration, without reading weights or starting processes."""
    found = Material(config)
    path, trust = config.model.path, config.model.trust_remote_code

    def attempt(part: str, make: Callable[[], T]) -> T | None:
        try:
            return make()
        except (ValueError, OSError) as error:
            found.missing[part] = str(error)
            return None

    found.device = attempt("device", lambda: devices.resolve(config.device, config.model.dtype))
    found.mesh = attempt("mesh", lambda: _layout(config))
    found.model = attempt("model", lambda: load_skeleton(path, trust_remote_code=trust))
    named = config.model.tokenizer or path
    found.tokenizer = attempt("tokenizer", lambda: load_tokenizer(named, trust_remote_code=trust))
    if found.tokenizer is None:
        found.missing["prompts"] = "they need the tokenizer"
    elif absent := _absent(config):
        found.missing["prompts"] = f"{', '.join(absent)}: not on this disk"
    else:
        found.prompts = attempt("prompts", lambda: load_prompts(config, found.tokenizer))
    if any(entry.name == REWARD_MODEL for entry in reward_entries(config)):
        found.missing["scorer"] = "a reward model's weights are not read here"
    else:
        found.scorer = attempt("scorer", lambda: _scorer(config))
    found.trained_model = attempt("trained_model", lambda: _with_adapter(config))
    found.teacher = attempt("teacher", lambda: _teacher(config))
    return found


def material_of_run(config: Config, parts: Parts, prompts: Prompts, scorer: Scorer) -> Material:
    """The material of a run that has loaded everything; `close` is the run's business."""
    return Material(
        config,
        mesh=parts.mesh,
        device=parts.device,
        model=load_skeleton(config.model.path, trust_remote_code=config.model.trust_remote_code),
        network=parts.policy.model,
        tokenizer=parts.tokenizer,
        prompts=prompts,
        scorer=scorer,
        trained_model=_with_adapter(config),
        teacher=_teacher(config),
    )


def reward_entries(config: Config) -> list[RewardEntry]:
    """Every reward function of the configuration."""
    return [*config.reward.functions, *(entry for several in config.reward.tasks.values() for entry in several)]


def as_ids(value: int | list[int] | None) -> set[int]:
    """{5} of 5, {5, 6} of [5, 6], nothing of None."""
    return set() if value is None else {value} if isinstance(value, int) else set(value)


def _with_adapter(config: Config) -> Any:
    model = load_skeleton(config.model.path, trust_remote_code=config.model.trust_remote_code)
    if config.lora is not None:
        attach_adapter(model, config.lora, config.model, seed=config.seed, dtype=torch.float32)
    return model


def _teacher(config: Config) -> Any:
    if config.distillation is None:
        return None
    return load_skeleton(config.distillation.teacher, trust_remote_code=config.model.trust_remote_code)


def _scorer(config: Config) -> Scorer:
    scorer = Scorer(config.reward, max_response_length=config.rollout.max_response_length)
    try:
        scorer.ready()
    except ValueError:
        scorer.close()
        raise
    return scorer


def _absent(config: Config) -> list[str]:
    train = config.data.train
    sources = [*(train if isinstance(train, list) else [train]), *([config.data.eval] if config.data.eval else [])]
    return [source for source in sources if not Path(source).exists() and not is_preprocessed(source)]


def _layout(config: Config) -> Mesh:
    parallel = config.parallel
    return Mesh(
        *resolve_degrees(
            world_size(),
            dp_replicate=parallel.dp_replicate,
            dp_shard=parallel.dp_shard,
            cp=parallel.cp,
            tp=parallel.tp,
            pp=parallel.pp,
        )
    )
