r"""Rewards that look at the form of a response: its tags, its length, its repetitions.

The expected form is `<think>reasoning</think><answer>answer</answer>`: each tag exactly once, in this order, closed,
and nothing but white space around and between the two blocks. Where the answer has a box, its braces must pair up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from covey.algorithm.shaping import overlong_penalty
from covey.rewards.base import Score, read_options
from covey.rewards.extraction import braces_pair_up

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FORM = re.compile(r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*", re.DOTALL)


@dataclass(frozen=True)
class Tagged:
    """A response in the expected form. Example: Tagged(reasoning="1+1 is 2", answer="\\boxed{2}")."""

    reasoning: str
    answer: str


def format_reward(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[Score]:
    """1.0 for a response in the expected form, else 0.0.

    Option `think_opened` (default false): the prompt already ends with `<think>`, so the response starts inside it.
    """
    options = read_options(config, {"think_opened": False})
    return [float(parse_tags(text, think_opened=options["think_opened"]) is not None) for text in responses]


def overlong_reward(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[Score]:
    """0 up to `buffer` tokens before the longest response, then linear down to -`factor`.

    Source: soft overlong punishment, DAPO, arXiv:2503.14476 eq. 13. Options: `buffer` (tokens; required), `factor`
    (default 1), `max_response_length` (default: rollout.max_response_length). The row needs `num_tokens`.
    """
    options = read_options(config, {"buffer": None, "factor": 1.0, "max_response_length": None})
    if not options["buffer"] or not options["max_response_length"]:
        raise ValueError(f"options buffer and max_response_length must be positive numbers of tokens, not {config}")
    penalties = overlong_penalty(
        np.array([row["num_tokens"] for row in rows]),
        max_response_length=options["max_response_length"],
        buffer=options["buffer"],
        factor=options["factor"],
    )
    return [float(penalty) for penalty in penalties]


def length_reward(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[Score]:
    """1.0 for `low` to `high` tokens, falling linearly to 0.0 at no tokens and at twice `high`."""
    options = read_options(config, {"low": 0, "high": None})
    low, high = options["low"], options["high"]
    if not high or not 0 <= low <= high:
        raise ValueError(f"options low and high must be numbers of tokens with 0 <= low <= high, not {config}")
    return [max(0.0, min(1.0, row["num_tokens"] / low if low else 1.0, 2 - row["num_tokens"] / high)) for row in rows]


def repetition_reward(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[Score]:
    """Minus the share of n-grams of words that were said before: 0.0 for a text that never repeats one, down to -1.0.

    Option `ngram` (default 4). Words are split at white space; a text shorter than one n-gram scores 0.0.
    """
    size = read_options(config, {"ngram": 4})["ngram"]
    scores: list[Score] = []
    for text in responses:
        words = text.lower().split()
        ngrams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
        scores.append(len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0)
    return scores


def parse_tags(text: str, *, think_opened: bool = False) -> Tagged | None:
    """The two blocks of a response in the expected form, or None."""
    if think_opened:
        text = "<think>" + text
    if any(text.count(tag) != 1 for tag in TAGS):
        return None
    match = _FORM.fullmatch(text)
    if match is None or ("\\boxed" in match[2] and not braces_pair_up(match[2])):
        return None
    return Tagged(match[1].strip(), match[2].strip())
