"""A reward of one's own: the response's last number must be the answer, and an equation alone earns a little more.

Named in grpo.yaml as `examples/smollm2/reward.py:equation`. In Python, without a model:
    equation(["It is 43.", "26 + 17 = 43"], 2 * [{"response": "43"}], {})
"""

from __future__ import annotations

import re
from typing import Any

_NUMBER = re.compile(r"-?\d+")
_EQUATION = re.compile(r"-?\d+ [+-] -?\d+ = -?\d+\.?")


def equation(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[dict[str, float]]:
    """1 when the last number is the answer, and `form` (option, default 0.2) more for an equation and nothing else."""
    bonus = config.get("form", 0.2)
    scores: list[dict[str, float]] = []
    for text, row in zip(responses, rows, strict=True):
        numbers = _NUMBER.findall(text)
        answer = float(bool(numbers) and numbers[-1] == row["response"])
        form = float(_EQUATION.fullmatch(text.strip()) is not None)
        scores.append({"score": answer + bonus * form, "answer": answer, "form": form})
    return scores
