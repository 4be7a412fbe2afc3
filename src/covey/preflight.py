"""Before the first step: is the output directory free, do the numbers fit, and what will the run do, worked out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from covey.config.presets import describe_preset
from covey.config.schema import Config, DistillationConfig
from covey.data.prompts import PromptSet
from covey.models.adapters import describe_adapter, has_adapter
from covey.rewards.runner import Scorer
from covey.types import Group, Response

log = logging.getLogger(__name__)


def check_output_dir(output: Path, resume: bool | str | None) -> None:
    """ValueError when the directory holds another run and no resume was asked for, or cannot be one."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"output_dir: {output} is a file; choose a directory")
    if not resume and ((output / "metrics.jsonl").exists() or (output / "checkpoints").exists()):
        raise ValueError(
            f"output_dir: {output} already holds a run; go on with it by --resume, or choose another output_dir"
        )


def check_lengths(longest_prompt: int, config: Config, model: Any) -> None:
    """ValueError when the longest prompt and a response together exceed the positions of the model (its config)."""
    limit = getattr(model, "max_position_embeddings", None)
    longest = longest_prompt + config.rollout.max_response_length
    if limit is not None and longest > limit:
        raise ValueError(
            f"the longest prompt ({longest_prompt} tokens) + rollout.max_response_length="
            f"{config.rollout.max_response_length} = {longest} tokens, but the model has positions for {limit}: "
            "lower data.max_prompt_length or rollout.max_response_length"
        )


def check_pass_on(
    pass_on: str | None, scorer: Scorer, prompts: PromptSet, task_key: str, *, probe: bool = True
) -> None:
    """ValueError when evaluation.pass_on is neither a reward nor a part of one.

    Which parts a function returns is known once it has scored: it is given the reference answer of a row of each task
    (unless `probe` is off).
    """
    labels = [row["reward"] for row in scorer.ready()]
    if pass_on is None or pass_on in labels:
        return
    label = pass_on.rpartition("/")[0]
    if label not in labels:
        raise ValueError(_unknown_reward(pass_on, labels))
    if not probe:
        return
    tasks = prompts.table[task_key].to_pylist() if task_key in prompts.table.column_names else []
    rows = sorted({tasks.index(task) for task in tasks} or {0})
    answers = [(prompts[i], str(prompts[i].row.get("response", ""))) for i in rows]
    scores = scorer.score([Group(prompt, [Response([0], [0.0], text=answer)]) for prompt, answer in answers])
    parts = [name for name in scores.details if name.rpartition("/")[0] == label]
    if pass_on in parts:
        return
    if label in scores.parts and not np.isnan(scores.parts[label]).all():
        raise ValueError(_unknown_reward(pass_on, [*labels, *parts]))
    log.warning("evaluation.pass_on: reward %s did not score a reference answer, so %r was not checked", label, pass_on)


def _unknown_reward(pass_on: str, known: Sequence[str]) -> str:
    near = get_close_matches(pass_on, known, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ";"
    return f"evaluation.pass_on: {pass_on!r} is neither a reward nor a part of one{hint} known: {', '.join(known)}"


def warn_changed_config(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Name every setting in which a resumed run differs from the one that wrote the checkpoint."""
    flat_before, flat_now = flatten(before), flatten(now)
    for key in sorted(flat_before.keys() | flat_now.keys()):
        old, new = flat_before.get(key), flat_now.get(key)
        if old != new:
            log.warning("resumed with another %s: %r, was %r", key, new, old)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} to {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def facts(
    config: Config,
    *,
    device: dict[str, str],
    model: Any,
    num_parameters: int,
    num_prompts: int,
    num_eval: int,
    dropped: Mapping[str, int],
    stop_tokens: Mapping[int, str],
    rewards: Sequence[Mapping[str, str]],
) -> dict[str, dict[str, str]]:
    """What was chosen and what a step amounts to: title -> line -> text; printed at start and kept in run.json."""
    train, rollout, algorithm = config.train, config.rollout, config.algorithm
    num_responses = train.batch_size * rollout.num_samples
    mini = algorithm.mini_batch_size or train.batch_size
    per_step = algorithm.epochs * (train.batch_size // mini)
    longest = config.data.max_prompt_length + rollout.num_samples * (rollout.max_response_length - 1)
    drops = "".join(f", {count} dropped ({reason})" for reason, count in dropped.items() if count)
    return {
        "Device": device | {"engine": "native"},
        "Model": {
            "path": config.model.path,
            "architecture": f"{model.config.model_type}, {num_parameters / 1e6:,.1f}M parameters, "
            f"vocabulary {model.config.vocab_size:,}",
            "stop tokens": ", ".join(f"{token} ({i})" for i, token in stop_tokens.items()),
            **({"adapter": describe_adapter(model)} if has_adapter(model) else {}),
            "reference": _describe_reference(config),
            **({} if config.distillation is None else {"teacher": _describe_teacher(config.distillation)}),
        },
        "Data": {
            "prompts": f"{num_prompts:,}{drops}",
            "held out": f"{num_eval:,}",
            "epochs": f"{train.steps * train.batch_size / num_prompts:.2f} over {train.steps} steps",
        },
        "Rewards": {row["reward"]: _describe_reward(row) for row in rewards} or {"none": "the teacher alone"},
        "Each step": {
            "preset": describe_preset(algorithm.preset, algorithm.model_dump()),
            "responses": f"{train.batch_size} prompts x G {rollout.num_samples} = {num_responses}",
            "optimizer steps": f"{algorithm.epochs} epochs x {train.batch_size // mini} mini-batches of {mini} prompts "
            f"({mini * rollout.num_samples} responses) = {per_step}; {train.steps * per_step} in all",
            "tokens": f"at most {num_responses * rollout.max_response_length:,} sampled; "
            f"at most {train.batch_size * longest:,} trained on, "
            f"in micro-batches of {train.max_tokens_per_micro_batch:,}",
            "old logprobs": "recomputed"
            if per_step > 1
            else "not needed: one optimizer step per rollout, the ratio is 1",
        },
    }


def _describe_reference(config: Config) -> str:
    settings = config.reference
    if not config.algorithm.kl_coef:
        return "not loaded (kl_coef 0)"
    notes = [config.model.ref_path or ("starting weights" if config.lora is None else "the model without the adapter")]
    if settings.sync_every:
        moves = f"decay {settings.decay:g}" if settings.decay else "it becomes the policy"
        notes.append(f"moves every {settings.sync_every} steps ({moves})")
    return ", ".join(notes + ["in host memory between uses"] * settings.offload)


def _describe_teacher(settings: DistillationConfig) -> str:
    notes = [settings.teacher, f"coef {settings.coef:g}", f"discount {settings.discount:g}"]
    return ", ".join(notes + ["in host memory between uses"] * settings.offload)


def _describe_reward(row: Mapping[str, str]) -> str:
    notes = [f"tasks: {row['tasks']}", row["form"], f"at most {row['time limit']}", row["sandbox"]]
    return f"{row['function']} x {row['weight']} ({'; '.join(note for note in notes if note)})"


def print_facts(facts: Mapping[str, Mapping[str, str]], console: Console | None = None) -> None:
    """One table on standard error."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for title, lines in facts.items():
        for i, (name, text) in enumerate(lines.items()):
            table.add_row(f"[bold]{title}[/bold]" if i == 0 else "", name, str(text))
    (console or Console(stderr=True)).print(table)
