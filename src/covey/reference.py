"""The models beside the policy that only score its responses: the reference of the KL term, and a teacher.

Both are sharded and cut as the policy is. `offload` keeps their weights in host memory between uses. A reference may
follow the policy; what it has become cannot be read from its files again, so it is part of checkpoints (`Follower`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from covey.config.schema import Config
from covey.distributed.fsdp import local_tensor
from covey.models.adapters import without_adapter
from covey.models.load import load_model, load_tokenizer
from covey.optim import Optimizer
from covey.policy import Policy
from covey.setup import Parts
from covey.types import Group

log = logging.getLogger(__name__)


class ScoresGroups(Protocol):
    """What an update asks of a reference or teacher."""

    def logprobs(self, groups: list[Group]) -> Tensor:
        """Log-probabilities (N,) of all response tokens of the step in canonical order, on every rank."""
        ...


class ScoringModel:
    """A frozen model that scores groups; in host memory between uses if it is offloaded."""

    def __init__(self, policy: Policy, parts: Parts, *, key: str, offload: bool) -> None:
        """key: the setting that names the model, for messages."""
        self.policy = policy
        self._key = key
        self._device = parts.device
        self._offload = offload and parts.device.kind != "cpu"
        self._num_ids = policy.model.config.vocab_size
        if self._offload:
            self._to_host()
        elif offload:
            log.info("%s: offload does nothing on cpu, where device and host memory are one", key)

    def logprobs(self, groups: list[Group]) -> Tensor:
        """As ScoresGroups; ValueError when a response has a token that the model has no number for."""
        largest = max((i for g in groups for r in g.responses for i in (*g.prompt.input_ids, *r.token_ids)), default=0)
        if largest >= self._num_ids:
            raise ValueError(
                f"{self._key}: the policy sampled token {largest}, but this model's vocabulary ends at "
                f"{self._num_ids - 1}; both sizes are padded, and this one less: choose a model with more rows"
            )
        with self._on_device():
            return self.policy.logprobs(groups)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if not self._offload:
            yield
            return
        self.policy.parallel.move(self._device.torch_device)
        try:
            yield
        finally:
            self._to_host()

    def _to_host(self) -> None:
        self.policy.parallel.move(torch.device("cpu"))
        self._device.release_memory()


class BaseModel:
    """The policy without its adapter, which is the model that LoRA started from: a reference that costs no memory."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def logprobs(self, groups: list[Group]) -> Tensor:
        """As ScoresGroups."""
        with without_adapter(self._policy.model):
            return self._policy.logprobs(groups)


class Follower:
    """Moves a reference toward the policy: reference = decay x reference + (1 - decay) x policy, every so many steps.

    Every rank blends the pieces that it holds, in fp32 (16-bit weights would lose the small differences of a decay near
    1, so an fp32 average is kept beside them). Source: TR-DPO, arXiv:2404.09656 (hard update: decay 0; soft update).
    """

    def __init__(
        self, reference: ScoringModel, policy: Policy, optimizer: Optimizer, *, sync_every: int, decay: float
    ) -> None:
        """sync_every 0: the reference stays, or goes on from what a checkpoint says. ValueError for other shapes."""
        self._reference = dict(reference.policy.model.named_parameters())
        self._policy = dict(policy.model.named_parameters())
        self._masters = {id(p): m for p, m in zip(optimizer.parameters, optimizer.masters, strict=True)}
        self._sync_every, self._decay = sync_every, decay
        self._steps = 0  # of the policy since the reference was loaded
        self.moved = sync_every > 0  # whether it is another model than its files hold
        shapes = [{name: tuple(p.shape) for name, p in model.items()} for model in (self._reference, self._policy)]
        self.possible = shapes[0] == shapes[1]
        if sync_every and not self.possible:
            name = next(n for n in shapes[0] | shapes[1] if shapes[0].get(n) != shapes[1].get(n))
            raise ValueError(
                f"reference.sync_every={sync_every}: model.ref_path has another architecture than model.path "
                f"({name}: {shapes[0].get(name)} and {shapes[1].get(name)}): its weights cannot become the policy's; "
                "remove sync_every or choose a reference of the policy's kind"
            )
        self._averages: dict[str, Tensor] = {}
        if decay:
            narrow = {name: p for name, p in self._reference.items() if p.dtype != torch.float32}
            self._averages = {name: local_tensor(p).detach().float() for name, p in narrow.items()}

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the reference if this step of the policy is one of those."""
        self._steps += 1
        if not self._sync_every or self._steps % self._sync_every:
            return
        for name, average in self.pieces().items():
            parameter = self._policy[name]
            current = self._masters.get(id(parameter), local_tensor(parameter)).to(average.device, average.dtype)
            if self._decay:
                average.lerp_(current, 1.0 - self._decay)
            else:
                average.copy_(current)
        self._publish()
        log.info("step %d: the reference moved to the policy (decay %g)", self._steps, self._decay)

    def pieces(self) -> dict[str, Tensor]:
        """This rank's part of the reference by parameter name, live, in the numbers that it is averaged in."""
        return {
            name: self._averages[name] if name in self._averages else local_tensor(parameter).detach()
            for name, parameter in self._reference.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps besides the weights."""
        return {"steps": self._steps, "moved": self.moved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint, whose weights were read into `pieces`."""
        self._steps = state["steps"]
        self.moved = state["moved"] or self._sync_every > 0
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        for name, average in self._averages.items():
            local_tensor(self._reference[name]).copy_(average)


def load_reference(config: Config, parts: Parts) -> ScoringModel | BaseModel:
    """The reference of the KL term, on the policy's device; ValueError when it has other tokens."""
    if config.lora is not None and config.model.ref_path is None:
        return BaseModel(parts.policy)
    key = "model.ref_path" if config.model.ref_path else "model.path"
    reference = _load(config.model.ref_path or config.model.path, config, parts, key=key)
    sizes = [policy.model.config.vocab_size for policy in (reference, parts.policy)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"model.ref_path: vocabulary of {sizes[0]}, but the policy has {sizes[1]}: "
            "the reference must use the policy's tokens"
        )
    return ScoringModel(reference, parts, key=key, offload=config.reference.offload)


def load_teacher(config: Config, parts: Parts) -> ScoringModel:
    """The teacher of `distillation`; ValueError unless its tokenizer gives every token the policy's id."""
    assert config.distillation is not None
    check_teacher_tokens(config, parts.tokenizer)
    teacher = _load(config.distillation.teacher, config, parts, key="distillation.teacher")
    return ScoringModel(teacher, parts, key="distillation.teacher", offload=config.distillation.offload)


def check_teacher_tokens(config: Config, tokenizer: Any) -> None:
    """ValueError unless the teacher's tokenizer has the tokens of the policy's (`tokenizer`) under the same ids."""
    assert config.distillation is not None
    path = config.distillation.teacher
    try:
        theirs = load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
        _compare_tokens(tokenizer.get_vocab(), theirs.get_vocab())
    except ValueError as error:
        raise ValueError(f"distillation.teacher={path!r} cannot judge the policy's tokens: {error}") from error


def _compare_tokens(*vocabularies: dict[str, int]) -> None:
    different = [token for token, i in vocabularies[0].items() if vocabularies[1].get(token) != i]
    different += [token for token in vocabularies[1] if token not in vocabularies[0]]
    if different:
        example = different[0]
        raise ValueError(
            f"{len(different)} tokens differ, for example {example!r}: id {vocabularies[0].get(example)} in the "
            f"policy's tokenizer, {vocabularies[1].get(example)} in the other; log-probabilities of ids compare "
            "only when the ids mean the same: choose a model with the policy's tokenizer"
        )


def _load(path: str, config: Config, parts: Parts, *, key: str) -> Policy:
    try:
        network = load_model(
            path,
            dtype=parts.device.dtype,
            device=parts.device.torch_device,
            reference_kernels=config.model.kernels == "reference",
            trust_remote_code=config.model.trust_remote_code,
            fill_later=parts.mesh.world > 1,
        )
    except ValueError as error:
        raise ValueError(str(error).replace("model.path", key)) from error
    network.requires_grad_(False)
    policy = parts.policy
    same_depth = network.config.get_text_config().num_hidden_layers == sum(config.parallel.pp_layers or [])
    return Policy(
        network,
        device=policy.device,
        temperature=policy.temperature,
        limits=policy.limits,
        mesh=parts.mesh,
        compute_dtype=parts.device.dtype,
        sequence_parallel=config.parallel.sequence_parallel,
        pp_chunks=config.parallel.pp_chunks,
        pp_layers=config.parallel.pp_layers if same_depth else None,
        sampling_consistent=policy.sampling_consistent,
    )
