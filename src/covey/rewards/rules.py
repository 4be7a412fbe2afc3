r"""Rewards that look at the form of a response: its tags.

The expected form is `<think>reasoning</think><answer>answer</answer>`: each tag exactly once, in this order, closed,
and nothing but white space around and between the two blocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from covey.rewards.base import Score, read_options

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


def parse_tags(text: str, *, think_opened: bool = False) -> Tagged | None:
    """The two blocks of a response in the expected form, or None."""
    if think_opened:
        text = "<think>" + text
    if any(text.count(tag) != 1 for tag in TAGS):
        return None
    match = _FORM.fullmatch(text)
    return Tagged(match[1].strip(), match[2].strip()) if match else None
