"""Runs one optimizer step on a fixed set and looks: activations, log-probabilities, gradients, weights.

The step is `Learner.learn` with the run's own policy. What is put around it only copies: hooks on the model, a function
between the forward and the loss, a look at the gradients before the optimizer takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from covey.config.schema import Config
from covey.distributed.collectives import gather_objects
from covey.learner import Learner, make_learner
from covey.optim import Optimizer
from covey.rewards.runner import Scorer
from covey.setup import Parts
from covey.tools.align.budget import Plan, make_plan
from covey.tools.align.fingerprint import fingerprint
from covey.tools.align.fixed_set import FixedSet
from covey.tools.align.hooks import Key, Recorded, Recorder
from covey.tools.align.paths import EagerPath
from covey.tools.align.rows import Layout
from covey.types import PackedBatch


class _WatchedOptimizer:
    """The optimizer, with a look at the gradients before its step."""

    def __init__(self, optimizer: Optimizer, before: Callable[[], None]) -> None:
        self._optimizer, self._before = optimizer, before

    def step(self, lr: float) -> float:
        self._before()
        return self._optimizer.step(lr)


@dataclass(frozen=True)
class Found:
    """What the forward showed, of all ranks."""

    steps: dict[Key, Recorded]
    tokens: dict[str, Tensor]  # logprobs, entropy: (N,) fp32


@dataclass
class Watched:
    """A step that was run, as this rank saw it."""

    plan: Plan
    rows: np.ndarray  # canonical rows whose activations are kept
    logit_rows: np.ndarray
    recorder: Recorder | None  # None: a rank has only parts of the activations
    optimizer: Optimizer
    tokens: dict[str, Tensor]  # logprobs, entropy: (N,) fp32, NaN where another rank has it
    gradients: dict[str, Tensor] = field(default_factory=dict)  # some rows of each
    gradient_rows: dict[str, Tensor] = field(default_factory=dict)
    gradient_norms: dict[str, float] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)  # the same rows of the weights
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0))  # (P, G)
    stats: dict[str, float] = field(default_factory=dict)

    def collect(self, parts: Parts) -> Found:
        """Put the ranks' parts together, on every rank."""
        mine = ({} if self.recorder is None else self.recorder.found, self.tokens)
        merged: dict[Key, Recorded] = {}
        tokens = {name: values.clone() for name, values in self.tokens.items()}
        for found, of_rank in gather_objects(mine, parts.mesh.world_group, what="captured activations"):
            for key, record in found.items():
                if key not in merged:
                    merged[key] = record
                    continue
                have, new = merged[key], record.seen & ~merged[key].seen
                if len(have.norms):
                    have.norms[new] = record.norms[new]
                have.values[new[have.rows]] = record.values[new[have.rows]]
                have.seen |= record.seen
            for name, values in of_rank.items():
                tokens[name] = torch.where(tokens[name].isnan(), values, tokens[name])
        return Found(merged, tokens)


def watch(config: Config, parts: Parts, fixed: FixedSet, layout: Layout, *, path: str, budget_bytes: int) -> Watched:
    """Run the step on the set, its forward by `path`."""
    policy, mesh = parts.policy, parts.mesh
    num_tokens = len(layout.targets)
    dtype = policy.parallel.compute_dtype
    plan = make_plan(policy.model, layout, budget_bytes=budget_bytes, num_tokens=num_tokens, dtype=dtype)
    rows = layout.choose(plan.rows)
    targets = np.unique(layout.targets)
    places = np.linspace(0, len(targets) - 1, min(plan.logit_rows, len(targets))).astype(int)
    logit_rows = targets[np.unique(places)]
    recorder = None
    if mesh.tp * mesh.cp == 1:
        recorder = Recorder(policy.model, num_rows=len(layout), rows=rows, logit_rows=logit_rows, details=plan.details)
    tokens = {name: torch.full((num_tokens,), float("nan")) for name in ("logprobs", "entropy")}
    with closing(_scale_only(config)) as scorer:
        learner = make_learner(config, parts, scorer)
        watched = Watched(plan, rows, logit_rows, recorder, learner.optimizer, tokens)
        optimizer = _WatchedOptimizer(learner.optimizer, lambda: _take_gradients(parts, watched))
        learner = replace(learner, optimizer=cast(Optimizer, optimizer))
        with _forward(config, parts, fixed, layout, path, recorder, tokens):
            _learn(learner, fixed, watched)
    return watched


def _learn(learner: Learner, fixed: FixedSet, watched: Watched) -> None:
    watching = nullcontext() if watched.recorder is None else watched.recorder.watching()
    with watching:
        batch, stats = learner.learn(fixed.groups, fixed.scores)
    watched.advantages, watched.stats = batch.advantages, stats.values


@contextmanager
def _forward(
    config: Config,
    parts: Parts,
    fixed: FixedSet,
    layout: Layout,
    path: str,
    recorder: Recorder | None,
    tokens: dict[str, Tensor],
) -> Iterator[None]:
    """Inside, the policy's forwards go through `path` and are announced to the recorder."""
    parallel = parts.policy.parallel
    score, accumulate = parallel.score, parallel.accumulate

    def nothing(*_: Any) -> None: ...

    expect = nothing if recorder is None else recorder.expect
    if path != "packed":
        parts.policy.model.set_attn_implementation("eager")

    def eager(announced: Callable[..., None]) -> EagerPath:
        return EagerPath(
            parts.policy.model,
            fixed.groups,
            layout,
            temperature=config.rollout.temperature,
            padded=path == "padded",
            expect=announced,
        )

    def watched(batches: Sequence[PackedBatch], loss_of: Callable[..., Tensor], *, as_sampled: bool = False) -> None:
        def loss(batch: PackedBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
            for name, values in (("logprobs", logprobs), ("entropy", entropy)):
                tokens[name][batch.token_index.cpu()] = values.detach().float().cpu()
            return loss_of(batch, logprobs, entropy)

        if path != "packed":
            eager(expect).accumulate(batches, loss, as_sampled=as_sampled)
            return
        for batch in batches:
            expect(layout.of_packed(batch), (1, batch.num_tokens))
        accumulate(batches, loss, as_sampled=as_sampled)

    parallel.accumulate = watched
    if path != "packed":
        parallel.score = eager(nothing).score
    try:
        yield
    finally:
        parallel.score, parallel.accumulate = score, accumulate


def _trained(parts: Parts) -> list[tuple[str, Any]]:
    return [(name, p) for name, p in parts.policy.model.named_parameters() if p.requires_grad]


def fingerprints(parts: Parts) -> dict[str, dict[str, Any]]:
    """Of every parameter, whole. Vectors, such as biases, are kept as they are."""
    found = {}
    for name, parameter in parts.policy.model.named_parameters():
        whole = parts.policy.parallel.whole(name, parameter.detach())
        if parts.mesh.is_main:
            found[name] = fingerprint(whole) | ({"vector": whole.cpu().clone()} if whole.dim() == 1 else {})
    return found


def _take_gradients(parts: Parts, watched: Watched) -> None:
    """Norm of every parameter's gradient and as many rows of it as fit; the same rows of the weight."""
    trained = _trained(parts)
    share = watched.plan.gradient_bytes // max(1, len(trained))
    masters = _masters(parts, watched.optimizer)
    for name, parameter in trained:
        gradient = parameter.grad
        whole = None if gradient is None else parts.policy.parallel.whole(name, gradient)
        weight = parts.policy.parallel.whole(name, masters[name])
        if not parts.mesh.is_main:
            continue
        matrix = _matrix(weight.new_zeros(weight.shape) if whole is None else whole).float()
        watched.gradient_norms[name] = float(matrix.double().norm())
        count = min(len(matrix), share // (8 * matrix.shape[1] + 8))
        rows = torch.from_numpy(np.unique(np.linspace(0, len(matrix) - 1, count).round().astype(np.int64)))
        watched.gradient_rows[name] = rows
        watched.gradients[name] = matrix[rows.to(matrix.device)].cpu()
        watched.before[name] = _matrix(weight)[rows.to(weight.device)].float().cpu()


def weights_after(parts: Parts, watched: Watched) -> dict[str, dict[str, Any]]:
    """Fingerprint of every trained weight after the step, and the rows of `before` as they changed."""
    found = {}
    masters = _masters(parts, watched.optimizer)
    for name, _ in _trained(parts):
        weight = parts.policy.parallel.whole(name, masters[name])
        if parts.mesh.is_main:
            rows = watched.gradient_rows[name].to(weight.device)
            moved = _matrix(weight)[rows].float().cpu() - watched.before[name]
            found[name] = {key: fingerprint(weight)[key] for key in ("norm", "sha256")} | {"update": moved}
    return found


def _masters(parts: Parts, optimizer: Optimizer) -> dict[str, Tensor]:
    """Name -> the fp32 weight that the optimizer moves (of a sharded model the parameter itself)."""
    trained = _trained(parts)
    if parts.mesh.world > 1:
        return {name: parameter.detach() for name, parameter in trained}
    by_id = {id(p): master.detach() for p, master in zip(optimizer.parameters, optimizer.masters, strict=True)}
    return {name: by_id[id(parameter)] for name, parameter in trained}


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1) if tensor.dim() else tensor.reshape(1, 1)


def _scale_only(config: Config) -> Scorer:
    """For the scale of given scores: no reward function is loaded."""

    def never(responses: list[str], rows: list[dict[str, Any]], options: dict[str, Any]) -> list[float | None]:
        raise AssertionError("the set's scores are not computed again")

    entries = [*config.reward.functions, *(e for several in config.reward.tasks.values() for e in several)]
    return Scorer(config.reward, local={entry.name: never for entry in entries})
