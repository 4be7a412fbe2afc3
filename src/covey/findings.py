"""What a check found: the record that preflight, doctor and selftest share, and its JSON. No torch, nothing of ours."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Severity = Literal["ok", "warning", "failure", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One check and its outcome, in words for a person and numbers for a program.

    Example: Finding("eos", "failure", "151643", "one of 151645", "responses would run on", "set model.tokenizer",
    {"tokenizer": 151643, "model": [151645]})
    """

    rule: str
    severity: Severity
    found: str
    expected: str
    why: str  # why it matters
    fix: str  # what to do; "" when there is nothing to do
    evidence: dict[str, Any] = field(default_factory=dict)


def as_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """{"pass": no failure, "findings": [...]}, with numbers that JSON has a word for."""
    listed = list(findings)
    return {"pass": passed(listed), "findings": [plain(asdict(finding)) for finding in listed]}


def passed(findings: Iterable[Finding]) -> bool:
    """Whether nothing failed; warnings pass."""
    return all(finding.severity != "failure" for finding in findings)


def plain(value: Any) -> Any:
    """What JSON has a word for: the numbers of numpy as Python's, NaN and infinity as None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if getattr(value, "shape", None) == ():  # a scalar of numpy or torch
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
