"""The fixed set that a capture runs: recorded rollouts, given rows, another bundle's set, or a few fresh samples.

A set must have a gradient, or half of the ladder compares zeros with zeros. So given rows and greedy samples become
groups of two, each prompt with its own answer (reward 1) and with the next prompt's (reward 0), and sampled groups
whose rewards are all equal get 1 and 0 in turn; `origin` says so.
"""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from covey.config.schema import Config
from covey.models.attention import ATTENTION
from covey.rewards.scores import Scores
from covey.rollout.records import read_records, recorded_steps, records_path
from covey.setup import Parts, load_prompts, make_engine, make_scorer, sampling_of, stop_token_ids
from covey.tools.align.bundle import read_bundle
from covey.types import Group, Prompt, Response

log = logging.getLogger(__name__)
ENGINES = ("native", "hf")


@dataclass(frozen=True)
class Source:
    """Where the set comes from; at most one of records, data and bundle."""

    records: Path | None = None  # a run
    step: int | None = None  # of the run
    data: Path | None = None  # rows with reference answers, by the keys of section data
    bundle: Path | None = None  # another capture
    prompts: int = 4  # how many groups, 0: all
    engine: str = "native"  # of fresh samples; hf: transformers' generate, greedy
    greedy: bool = False


@dataclass
class FixedSet:
    """Groups with their scores. `exact`: to be run as they are."""

    groups: list[Group]
    scores: Scores
    origin: str


def load_set(source: Source, config: Config, parts: Parts) -> FixedSet:
    """The set, the same on every rank; ValueError says which option does not fit."""
    given = [o for o in ("records", "data", "bundle") if getattr(source, o) is not None]
    if len(given) > 1:
        raise ValueError(
            f"--{given[0]} and --{given[1]} exclude each other: a capture runs one set".replace("bundle", "from")
        )
    if source.bundle is not None:
        bundle = read_bundle(source.bundle)
        return FixedSet(bundle.groups(), bundle.scores(), f"{bundle.meta['origin']}, from bundle {source.bundle.name}")
    if source.records is not None:
        return _recorded(source, source.records)
    if source.data is not None:
        return _given(source, config, parts, source.data)
    return _sampled(source, config, parts)


def _recorded(source: Source, run: Path) -> FixedSet:
    have = recorded_steps(run)
    if not have:
        raise ValueError(f"--records {run}: no rollouts/step-*.parquet (logging.records was off, or not a run)")
    step = have[-1] if source.step is None else source.step
    if step not in have:
        raise ValueError(f"--step {step}: not recorded in {run}; recorded are {have[0]} to {have[-1]}")
    records = read_records(records_path(run, step))
    count = min(source.prompts or len(records.groups), len(records.groups))
    scores = _plain_scores(records.groups[:count], records.rewards[:count])
    scores.parts = {name: cells[:count] for name, cells in records.parts.items()}
    if (trained := records.trained) is not None:
        scores.weights = {name: weights[:count] for name, weights in trained.weights.items()}
        scores.tasks, scores.ranges = trained.tasks[:count], trained.ranges[:count]
    return _with_spread(FixedSet(records.groups[:count], scores, f"records of {run.name}, step {step}"))


def _given(source: Source, config: Config, parts: Parts, rows: Path) -> FixedSet:
    data = config.data.model_copy(update={"train": str(rows), "eval": None, "eval_rows": 0, "limit": None})
    prompts = load_prompts(config.model_copy(update={"data": data}), parts.tokenizer).train
    count = min(source.prompts or len(prompts), len(prompts))
    chosen = [prompts[i] for i in range(count)]
    end = parts.tokenizer.eos_token_id
    answers = []
    for prompt in chosen:
        text = str(prompt.row.get("response") or "")
        ids = parts.tokenizer.encode(text, add_special_tokens=False)[: config.rollout.max_response_length - 1]
        if not ids:
            raise ValueError(
                f"--data {rows}: row {prompt.uid} has no reference answer; data.response_key names its column"
            )
        ids = [*ids, *([] if end is None else [end])]
        answers.append(Response(ids, [0.0] * len(ids), text))
    return _paired(chosen, answers, f"rows of {rows.name} with their reference answers")


def _sampled(source: Source, config: Config, parts: Parts) -> FixedSet:
    if source.engine not in ENGINES:
        raise ValueError(f"--engine {source.engine}: known are {', '.join(ENGINES)}")
    if source.engine == "hf" and not source.greedy:
        raise ValueError("--engine hf: transformers draws other random numbers than Covey; add --greedy")
    prompts = load_prompts(config, parts.tokenizer)
    count = min(source.prompts or len(prompts.train), len(prompts.train))
    chosen = [prompts.train[i] for i in range(count)]
    if source.engine == "hf":
        stops = stop_token_ids(config, parts, prompts)
        answers = [_generate(parts, prompt, stops, config.rollout.max_response_length) for prompt in chosen]
        return _paired(chosen, answers, "greedy samples of transformers' generate")
    sampling = sampling_of(config, 0)
    if source.greedy:
        sampling = replace(sampling, temperature=0.0, num_samples=1)
    groups = make_engine(config, parts, prompts).generate(chosen, sampling)
    if source.greedy:
        return _paired(chosen, [group.responses[0] for group in groups], "greedy samples of the native engine")
    with closing(make_scorer(config, parts)) as scorer:
        scorer.ready()
        scores = scorer.score(groups)
    return _with_spread(FixedSet(groups, scores, "samples of the native engine"))


@torch.no_grad()
def _generate(parts: Parts, prompt: Prompt, stops: list[int], max_length: int) -> Response:
    model = parts.policy.model
    ids = torch.tensor([prompt.input_ids], device=parts.device.torch_device)
    model.eval()
    model.set_attn_implementation("eager")
    try:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_length,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=stops,
            pad_token_id=stops[0],
        )
    finally:
        model.set_attn_implementation(ATTENTION)
    answer = out[0, ids.shape[1] :].tolist()
    reason = "stop" if answer[-1] in stops else "length"
    return Response(answer, [0.0] * len(answer), parts.tokenizer.decode(answer, skip_special_tokens=True), reason)


def _paired(prompts: list[Prompt], answers: list[Response], origin: str) -> FixedSet:
    """Each prompt with its own answer, reward 1, and the next prompt's, reward 0."""
    if len(prompts) < 2:
        raise ValueError(
            "a set of answers needs two prompts or more, so that a right and a wrong answer can be compared"
        )
    groups = [Group(prompt, [answers[i], answers[(i + 1) % len(answers)]]) for i, prompt in enumerate(prompts)]
    return FixedSet(groups, _plain_scores(groups, np.array([[1.0, 0.0]] * len(groups))), origin + ", paired")


def _with_spread(fixed: FixedSet) -> FixedSet:
    rewards = fixed.scores.total
    known = ~np.isnan(rewards)
    if any(np.ptp(row[mask]) > 0 for row, mask in zip(rewards, known, strict=True) if mask.any()):
        return fixed
    log.warning("all rewards of a group are equal, so the loss has no gradient: they become 1 and 0 in turn")
    turns = np.broadcast_to(1.0 - np.arange(rewards.shape[1]) % 2, rewards.shape).copy()
    if known.any():
        turns[~known] = np.nan
    return FixedSet(fixed.groups, _plain_scores(fixed.groups, turns), fixed.origin + ", rewards 1 and 0 in turn")


def _plain_scores(groups: list[Group], total: np.ndarray) -> Scores:
    """Rewards of one function of weight 1."""
    ones: dict[str, Any] = {"weights": {"set": np.ones(len(groups))}, "parts": {"set": total.copy()}}
    counts = {"errors": 0, "timeouts": 0, "none": 0}
    return Scores(total, **ones, counts=counts, tasks=[""] * len(groups), ranges=[(0.0, 1.0)] * len(groups))
