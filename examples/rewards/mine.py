"""A reward function of one's own: named in the YAML as `examples/rewards/mine.py:base_reward`."""

from __future__ import annotations

from typing import Any


def base_reward(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[float | None]:
    """Share of the reference's words that the response uses; None (left out) for a row without a reference."""
    scores: list[float | None] = []
    for response, row in zip(responses, rows, strict=True):
        wanted = set(str(row.get("response") or "").lower().split())
        scores.append(len(wanted & set(response.lower().split())) / len(wanted) if wanted else None)
    return scores


def multitask_reward(responses: list[str], data: list[dict[str, Any]], config: dict[str, Any]) -> list[float]:
    """One function for all tasks, in the style of a switch over `task`: works as it is under reward.functions."""
    scores = []
    for response, item in zip(responses, data, strict=True):
        if item["task"] == "math":
            score = float("\\boxed" in response)
        elif item["task"] == "code":
            score = float("def " in response)
        else:
            score = float(bool(response.strip()))
        scores.append(score)
    return scores
