r"""The `math` reward: form of the response, quality of the reasoning, final answer.

Both the response and the reference may be tagged text; the answer is what extraction.extract_answer finds in each.
"""

from __future__ import annotations

import re
from typing import Any

from covey.rewards.algebra import same_answer
from covey.rewards.base import Score, read_options
from covey.rewards.extraction import extract_answer, extract_reference
from covey.rewards.reasoning import reasoning_quality
from covey.rewards.rules import parse_tags

WEIGHTS = {"format": 0.3, "reasoning": 0.4, "answer": 0.3}
_REASONING = {"num_steps": 3, "min_units": 5, "max_units": 2000}


def math_reward(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[Score]:
    """Weighted sum of the parts `format`, `reasoning` and `answer`, each in [0, 1].

    Options: `weights` (map from part to weight; a part that is not named has weight 0; default WEIGHTS), `think_opened`
    (as in `format`), `num_steps`, `min_units`, `max_units` (as in reasoning.reasoning_quality). The parts of the
    reasoning are returned too. A row without a reference is an error: it needs another reward.
    """
    options = read_options(config, {"weights": WEIGHTS, "think_opened": False, **_REASONING})
    weights = {**dict.fromkeys(WEIGHTS, 0.0), **read_options(options["weights"], dict.fromkeys(WEIGHTS, 0.0))}
    limits = {key: options[key] for key in _REASONING}
    scores: list[Score] = []
    for response, row in zip(responses, rows, strict=True):
        quality = reasoning_quality(reasoning_of(response), **limits)
        parts = {
            "format": float(parse_tags(response, think_opened=options["think_opened"]) is not None),
            "reasoning": quality.score,
            "answer": float(is_correct(response, reference_of(row))),
        }
        score = sum(weights[name] * value for name, value in parts.items())
        scores.append({"score": score, **parts, **{f"reasoning_{key}": value for key, value in vars(quality).items()}})
    return scores


def answer_reward(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[Score]:
    """1.0 when the final answer equals the reference, else 0.0; nothing about form. No options."""
    read_options(config, {})
    return [float(is_correct(text, reference_of(row))) for text, row in zip(responses, rows, strict=True)]


def is_correct(response: str, reference: object) -> bool:
    """Whether the final answer of `response` equals the (extracted) reference."""
    answer = extract_answer(response)
    return answer is not None and same_answer(answer, extract_reference(reference))


def reasoning_of(response: str) -> str:
    """The text between the thinking tags; without tags, everything before the answer block."""
    text = response.rsplit("</think>", 1)[0] if "</think>" in response else response
    text = text.split("<answer>", 1)[0]
    return re.sub(r"</?think>", " ", text)


def reference_of(row: dict[str, Any]) -> object:
    """The row's `response`; ValueError when it is absent or empty."""
    reference = row.get("response")
    if reference is None or (isinstance(reference, str) and not reference.strip()):
        raise ValueError(f"the row has no reference answer in 'response'; its columns: {sorted(row)}")
    return reference
