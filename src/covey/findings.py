"""What a check found: the record that preflight and `covey doctor` share. No torch, no imports of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
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
