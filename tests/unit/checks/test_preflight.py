"""All checks together: what stops a run, what is skipped, and what a run keeps of it."""

from __future__ import annotations

import json
import logging

import pytest

from covey.checks.preflight import CHECKS, failures, log_warnings, preflight_findings
from covey.config.load import LoadedConfig
from covey.findings import Finding
from covey.trainer import train


def of(findings: list[Finding]) -> dict[str, str]:
    return {finding.rule: finding.severity for finding in findings}


def test_a_sound_configuration_passes_every_check(make):
    config = make().config
    found = preflight_findings(config)
    assert of(found) == dict.fromkeys(CHECKS, "ok") | {"turn_end": "skipped"}
    assert failures(found) is None


def test_every_finding_of_a_check_bears_its_name(make):
    assert [finding.rule for finding in preflight_findings(make().config)] == list(CHECKS)


def test_all_failures_are_said_in_one_paragraph(place, make, edit_json):
    edit_json(place / "model" / "config.json", eos_token_id=7, vocab_size=300)
    edit_json(place / "model" / "generation_config.json", eos_token_id=7)
    text = failures(preflight_findings(make().config))
    assert text is not None and text.startswith("preflight: 3 of 15 checks failed. eos: ") and "\n" not in text
    assert "| vocabulary: " in text and "| weights: " in text


def test_what_cannot_be_loaded_is_a_failure_and_what_is_elsewhere_is_not(place, make):
    config = make(model={"path": str(place / "none")}).config
    severities = of(preflight_findings(config))
    assert severities["load_model"] == severities["load_tokenizer"] == "failure"
    assert severities["eos"] == severities["prompt_ids"] == "skipped" and "load_prompts" not in severities
    severities = of(preflight_findings(make(data={"train": str(place / "away.jsonl")}).config))
    assert severities["load_prompts"] == severities["rewards"] == "skipped" and severities["eos"] == "ok"


def test_a_check_is_left_out_by_name_and_reason(place, make, edit_json):
    edit_json(place / "model" / "config.json", eos_token_id=7)
    edit_json(place / "model" / "generation_config.json", eos_token_id=7)
    found = preflight_findings(make(preflight={"skip": {"eos": "known"}}).config)
    assert of(found)["eos"] == "skipped" and failures(found) is None
    assert found[0].why == "preflight.skip: known"
    with pytest.raises(ValueError, match=r"preflight.skip: 'eso' is no check; known: eos, "):
        preflight_findings(make(preflight={"skip": {"eso": "x"}}).config)


def test_warnings_are_logged(make, caplog):
    with caplog.at_level(logging.WARNING):
        log_warnings(preflight_findings(make(rollout={"max_response_length": 10}).config))
    assert [record.message.split(":")[0] for record in caplog.records] == ["preflight lengths"]


def test_a_run_with_a_failure_does_not_start(place, make, edit_json):
    edit_json(place / "model" / "config.json", eos_token_id=7)
    edit_json(place / "model" / "generation_config.json", eos_token_id=7)
    with pytest.raises(ValueError, match=r"preflight: 1 of 15 checks failed. eos: tokenizer: 1 \(<eos>\)"):
        train(LoadedConfig(make().config, {}, "test"), quiet=True)
    assert not (place / "out").exists()


def test_a_run_keeps_its_findings(place, make):
    config = make(rollout={"max_response_length": 10}, train={"steps": 1}).config
    train(LoadedConfig(config, {}, "test"), quiet=True)
    kept = {f["rule"]: f for f in json.loads((place / "out" / "run.json").read_text())["Preflight"]}
    assert list(kept) == list(CHECKS)
    assert kept["lengths"]["severity"] == "warning" and kept["eos"]["evidence"]["tokenizer"] == 1
