"""Do limits and batches fit the data? Lengths, drops, prompts a step, optimizer steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from covey.checks.material import Material
from covey.findings import Finding

_MANY = 512  # reference answers that are tokenised
_MUCH = 0.1  # share of prompts left out, or of references cut, that is worth a look


def check_lengths(material: Material) -> Finding:
    """Limits against the percentiles of the data and the positions of the model."""
    assert material.prompts is not None
    train, config = material.prompts.train, material.config
    prompts = train.lengths
    answers = _answer_lengths(material)
    limit, positions = (
        config.rollout.max_response_length,
        getattr(material.model.config, "max_position_embeddings", None),
    )
    dropped = train.drops.get("too_long", 0) / max(1, train.num_rows_read)
    cut = float((answers > limit).mean()) if len(answers) else 0.0
    longest = int(prompts.max()) + limit
    evidence: dict[str, Any] = {
        "prompt_tokens": _percentiles(prompts),
        "reference_tokens": _percentiles(answers) if len(answers) else None,
        "dropped_share": dropped,
        "references_over_limit_share": cut,
        "longest": longest,
        "positions": positions,
    }
    found = f"prompts {_spell(prompts)}, {dropped:.1%} dropped for their length; "
    found += (
        f"reference answers {_spell(answers)}, {cut:.1%} longer than the limit" if len(answers) else "no references"
    )
    expected = f"prompts within {config.data.max_prompt_length}, answers within {limit} tokens"
    expected += f", both together within {positions} positions" if positions else ""
    why = "what does not fit is left out or cut off; a cut answer earns no reward, however good it was"
    if positions and longest > positions:
        fix = "lower data.max_prompt_length or rollout.max_response_length"
        return Finding("lengths", "failure", f"{found}; {longest} together", expected, why, fix, evidence)
    if dropped > _MUCH or cut > _MUCH:
        key = "data.max_prompt_length" if dropped > _MUCH else "rollout.max_response_length"
        return Finding("lengths", "warning", found, expected, why, f"raise {key}", evidence)
    return Finding("lengths", "ok", found, expected, why, "", evidence)


def check_batch(material: Material) -> Finding:
    """Prompts of a step against data and ranks, the token budget against the longest row, warm-up against steps."""
    assert material.prompts is not None and material.mesh is not None
    config, mesh, num_prompts = material.config, material.mesh, len(material.prompts.train)
    train, algorithm = config.train, config.algorithm
    mini = algorithm.mini_batch_size or train.batch_size
    steps = train.steps * algorithm.epochs * (train.batch_size // mini)
    longest = int(material.prompts.train.lengths.max()) + config.rollout.max_response_length - 1
    evidence = {
        "prompts": num_prompts,
        "batch_size": train.batch_size,
        "mini_batch_size": mini,
        "data_parallel": mesh.dp,
        "optimizer_steps": steps,
        "longest_row": longest,
        "micro_batch": train.max_tokens_per_micro_batch,
    }
    found = (
        f"{train.batch_size} of {num_prompts} prompts a step, mini-batches of {mini}, {mesh.dp} data-parallel ranks, "
    )
    found += f"{steps} optimizer steps; longest row {longest} of {train.max_tokens_per_micro_batch} tokens"
    expected = "a batch within the data, a mini-batch and a prompt for every rank, a row within the token budget"
    why = "prompts that repeat in a step count twice, idle ranks cost time, a row over the budget costs memory"
    problems = [
        (train.batch_size > num_prompts, "a step repeats prompts", "lower train.batch_size or give more data"),
        (mini < mesh.dp, "a mini-batch has fewer prompts than ranks", "raise algorithm.mini_batch_size"),
        (train.batch_size < mesh.num_data, "some ranks sample nothing", "raise train.batch_size"),
        (
            longest > train.max_tokens_per_micro_batch,
            "the longest prompt with one response is over the token budget",
            f"raise train.max_tokens_per_micro_batch to {longest}, or lower the length limits",
        ),
        (
            train.warmup_steps >= steps,
            "the run ends within its warm-up",
            "lower train.warmup_steps or use warmup_fraction",
        ),
    ]
    hit = [(problem, fix) for wrong, problem, fix in problems if wrong]
    if hit:
        found = "; ".join([found, *(problem for problem, _ in hit)])
        return Finding("batch", "warning", found, expected, why, "; ".join(fix for _, fix in hit), evidence)
    return Finding("batch", "ok", found, expected, why, "", evidence)


def _answer_lengths(material: Material) -> np.ndarray:
    """Tokens of some reference answers; empty without any."""
    assert material.prompts is not None
    table = material.prompts.train.table
    if "response" not in table.column_names:
        return np.zeros(0, dtype=int)
    column = table["response"]
    places = np.unique(np.linspace(0, len(column) - 1, min(_MANY, len(column))).astype(int))
    texts = [text for text in column.take(places).to_pylist() if text]
    return np.array([len(material.tokenizer.encode(text, add_special_tokens=False)) for text in texts], dtype=int)


def _percentiles(lengths: np.ndarray) -> dict[str, int]:
    return {f"p{q}": int(np.percentile(lengths, q)) for q in (50, 95)} | {"max": int(lengths.max())}


def _spell(lengths: np.ndarray) -> str:
    return ", ".join(f"{name} {value}" for name, value in _percentiles(lengths).items()) + " tokens"
