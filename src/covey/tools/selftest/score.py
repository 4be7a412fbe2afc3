"""The reward of the selftest's two steps: it tells apart even what an untrained model writes."""

from __future__ import annotations

from typing import Any


def distinct_characters(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[float | None]:
    """The share of a response's characters that are different ones; 0 for an empty text."""
    del rows, config
    return [len(set(text)) / len(text) if text else 0.0 for text in responses]
