"""Limits and batches that do not fit the data."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from covey.checks.rows import check_batch, check_lengths
from covey.distributed.mesh import Mesh


def test_a_sound_run_has_no_finding(make):
    material = make()
    assert check_lengths(material).severity == check_batch(material).severity == "ok"


def test_percentiles_are_those_of_the_data(place, make):
    rows = [json.loads(line) for line in (place / "train.jsonl").read_text().splitlines()]
    lengths = sorted(len(row["problem"].encode()) for row in rows)  # one token a byte
    found = check_lengths(make())
    assert found.evidence["prompt_tokens"]["max"] == lengths[-1]
    assert found.evidence["prompt_tokens"]["p50"] == lengths[len(lengths) // 2]


def test_answers_longer_than_the_limit_are_found(make):
    found = check_lengths(make(rollout={"max_response_length": 10}))
    assert found.severity == "warning" and found.evidence["references_over_limit_share"] == 1.0
    assert found.fix == "raise rollout.max_response_length"


def test_dropped_prompts_are_found(place, make):
    rows = (place / "train.jsonl").read_text().splitlines()
    long = [json.dumps({**json.loads(row), "problem": "9" * 50}) for row in rows[:100]]
    (place / "train.jsonl").write_text("\n".join([*long, *rows[100:]]) + "\n")
    found = check_lengths(make(data={"max_prompt_length": 16}))
    assert found.severity == "warning" and found.evidence["dropped_share"] == 100 / len(rows)
    assert found.fix == "raise data.max_prompt_length"


def test_a_row_beyond_the_positions_is_found(make):
    found = check_lengths(make(rollout={"max_response_length": 510}))
    assert found.severity == "failure" and found.evidence["longest"] == 516 and found.evidence["positions"] == 512


@pytest.mark.parametrize(
    ("changes", "mesh", "problem"),
    [
        ({"train": {"batch_size": 500}}, Mesh(), "a step repeats prompts"),
        ({"algorithm": {"mini_batch_size": 2}}, Mesh(dp_shard=3), "a mini-batch has fewer prompts than ranks"),
        ({}, Mesh(dp_shard=8), "some ranks sample nothing"),
        ({"train": {"max_tokens_per_micro_batch": 20}}, Mesh(), "over the token budget"),
        ({"train": {"warmup_steps": 5}}, Mesh(), "the run ends within its warm-up"),
    ],
)
def test_arithmetic_that_does_not_come_out_is_found(make, changes, mesh, problem):
    found = check_batch(replace(make(**changes), mesh=mesh))
    assert found.severity == "warning" and problem in found.found and found.fix
