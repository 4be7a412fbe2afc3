"""The table of rules: names, texts, and remedies that name settings which exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.planted_faults import RUNS

from covey.config.fields import list_fields
from covey.config.schema import Config
from covey.metrics import find
from covey.tools.doctor.evidence import Rule
from covey.tools.doctor.rules import RULES
from covey.tools.doctor.run import FAMILIES, diagnose

KEYS = {field.key for field in list_fields(Config)}
SECTIONS = {key.split(".")[0] for key in KEYS if "." in key}
NAMED = re.compile(rf"\b((?:{'|'.join(sorted(SECTIONS))})\.[a-z_]+)\b")


def unknown_settings(text: str) -> list[str]:
    """Settings that the text names and the schema does not have."""
    return [key for key in NAMED.findall(text) if key not in KEYS and not any(k.startswith(key + ".") for k in KEYS)]


def test_the_search_finds_settings():
    assert unknown_settings("train.lr / 3, train.no_such_thing up") == ["train.no_such_thing"]


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_rule_is_complete_and_names_only_what_exists(rule: Rule):
    assert rule.family in FAMILIES
    for text in (rule.expected, rule.why, rule.fix):
        assert text
    assert unknown_settings(f"{rule.fix}; {rule.expected}") == []
    for name in rule.needs:
        find(name)  # raises for a metric that is not declared
    assert rule.check.__doc__


@pytest.mark.parametrize("name", ["update_full", "rollout_full", "killed", "truncated", "slow_update", "slow_reward"])
def test_remedies_made_of_a_runs_numbers_name_only_what_exists(name: str, tmp_path: Path):
    RUNS[name].make(tmp_path / "run")
    for finding in diagnose(tmp_path / "run")[1]:
        assert unknown_settings(finding.fix) == []
