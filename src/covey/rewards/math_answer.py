r"""The `math` reward: form of the response and its final answer.

Both the response and the reference may be tagged text; the answer is what extraction.extract_answer finds in each.
"""

from __future__ import annotations

from typing import Any

from covey.rewards.base import Score, read_options
from covey.rewards.equality import equal_answers
from covey.rewards.extraction import extract_answer, extract_reference
from covey.rewards.rules import parse_tags

WEIGHTS = {"format": 0.3, "answer": 0.7}


def math_reward(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[Score]:
    """Weighted sum of the parts `format` and `answer`, each in [0, 1].

    Options: `weights` (map from part to weight; a part that is not named has weight 0), `think_opened` (as in
    `format`). A row without a reference is an error: rows that no answer belongs to need another reward.
    """
    options = read_options(config, {"weights": WEIGHTS, "think_opened": False})
    weights = {**dict.fromkeys(WEIGHTS, 0.0), **read_options(options["weights"], dict.fromkeys(WEIGHTS, 0.0))}
    scores: list[Score] = []
    for response, row in zip(responses, rows, strict=True):
        parts = {
            "format": float(parse_tags(response, think_opened=options["think_opened"]) is not None),
            "answer": float(is_correct(response, reference_of(row))),
        }
        scores.append({"score": sum(weights[name] * value for name, value in parts.items()), **parts})
    return scores


def is_correct(response: str, reference: object) -> bool:
    """Whether the final answer of `response` equals the (extracted) reference."""
    answer = extract_answer(response)
    return answer is not None and bool(equal_answers(answer, extract_reference(reference)))


def reference_of(row: dict[str, Any]) -> object:
    """The row's `response`; ValueError when it is absent or empty."""
    reference = row.get("response")
    if reference is None or (isinstance(reference, str) and not reference.strip()):
        raise ValueError(f"the row has no reference answer in 'response'; its columns: {sorted(row)}")
    return reference
