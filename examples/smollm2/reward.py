"""A reward of one's own: the response must be the number, and nothing else earns everything.

Named in grpo.yaml as `examples/smollm2/reward.py:number`; try it without a model:
python -c "from reward import number; print(number(['It is 43.', '43'], 2 * [{'response': '43'}], {}))"
"""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"-?\d+")


def number(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[dict[str, float]]:
    """1 when the response's last number is the answer; `short` (option, default 0.2) more when it says nothing else."""
    bonus = config.get("short", 0.2)
    scores: list[dict[str, float]] = []
    for text, row in zip(responses, rows, strict=True):
        numbers = _NUMBER.findall(text)
        right = float(bool(numbers) and numbers[-1] == row["response"])
        short = float(text.strip() == (numbers[-1] if numbers else None))
        scores.append({"score": right + bonus * short, "answer": right, "short": short})
    return scores
