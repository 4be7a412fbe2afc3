"""What counts as equal, and which difference is named first."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from rich.console import Console

from covey.rewards.scores import Scores
from covey.rollout.records import Records, Trained
from covey.tools.replay_compare import (
    EXACT,
    PROFILES,
    RUNGS,
    Check,
    compare_responses,
    compare_rewards,
    compare_update,
    first_difference,
    print_report,
)
from covey.types import Group, Prompt, Response

OLD = np.array([-0.5, -1.0, -0.25, -2.0, -0.125], dtype=np.float32)
METRICS = {"actor/loss": 0.5, "actor/grad_norm": 2.0, "actor/lr": 1e-3, "rollout/logprob_gap_max": 1e-6}


def records() -> Records:
    groups = [
        Group(Prompt(0, [1], "a"), [Response([5, 6], [-0.5, -1.0]), Response([7], [-0.25])]),
        Group(Prompt(1, [2], "b"), [Response([8, 9], [-2.0, -0.125], finish_reason="length")]),
    ]
    rewards = np.array([[1.0, 0.0], [0.5, math.nan]])
    trained = Trained({"math": np.ones(2)}, ["", ""], [(0.0, 1.0)] * 2, OLD, None, "00", {})
    return Records(7, groups, rewards, {"math": rewards}, np.array([[0.7, -0.7], [0.0, 0.0]]), trained)


def update(**changes) -> list[Check]:
    """The checks of an update that equals the record, but for `changes`."""
    found = {
        "advantages": records().advantages,
        "logprobs": {"old_logprobs": OLD, "ref_logprobs": None},
        "metrics": METRICS,
        "profile": EXACT,
    }
    return compare_update(records(), METRICS, **(found | changes))


def failed(checks: list[Check]) -> list[tuple[str, str]]:
    return [(check.rung, check.name) for check in checks if not check.ok]


def test_an_equal_update_passes_every_check():
    checks = update()
    assert not failed(checks) and len(checks) == 7
    assert {check.rung for check in checks} == {"logprobs", "advantages", "loss", "gradient", "learning rate"}


@pytest.mark.parametrize(
    ("changes", "rung", "name"),
    [
        ({"advantages": np.array([[0.7, -0.7], [0.0, 1e-17]])}, "advantages", "advantages"),
        (
            {"logprobs": {"old_logprobs": np.nextafter(OLD, np.float32(0)), "ref_logprobs": None}},
            "logprobs",
            "old_logprobs",
        ),
        ({"logprobs": {"old_logprobs": OLD[:4], "ref_logprobs": None}}, "logprobs", "old_logprobs"),
        ({"logprobs": {"old_logprobs": OLD, "ref_logprobs": OLD}}, "logprobs", "ref_logprobs"),
        ({"metrics": METRICS | {"actor/loss": math.nextafter(0.5, 1.0)}}, "loss", "actor/loss"),
        ({"metrics": METRICS | {"actor/kl_loss": 0.1}}, "loss", "actor/kl_loss"),
        ({"metrics": {k: v for k, v in METRICS.items() if k != "actor/loss"}}, "loss", "actor/loss"),
        ({"metrics": METRICS | {"actor/grad_norm": math.nan}}, "gradient", "actor/grad_norm"),
        ({"metrics": METRICS | {"actor/lr": 1.0000001e-3}}, "learning rate", "actor/lr"),
        ({"metrics": METRICS | {"rollout/logprob_gap_max": 2e-6}}, "logprobs", "rollout/logprob_gap_max"),
    ],
)  # fmt: skip
def test_the_smallest_difference_is_found_where_bits_must_be_equal(changes: dict, rung: str, name: str):
    assert (rung, name) in failed(update(**changes))
    assert {found for found, _ in failed(update(**changes))} == {rung}


def test_a_profile_allows_rounding_and_not_more():
    fp32 = PROFILES["float32"]
    near = update(
        metrics=METRICS | {"actor/grad_norm": 2.0 + 1e-5}, logprobs={"old_logprobs": OLD + 5e-6, "ref_logprobs": None},
        profile=fp32,
    )  # fmt: skip
    assert not failed(near)
    assert failed(update(metrics=METRICS | {"actor/grad_norm": 2.0 + 5e-5}, profile=fp32)) == [
        ("gradient", "actor/grad_norm")
    ]
    # After two recomputed steps three times as much may have added up.
    assert not failed(update(metrics=METRICS | {"actor/grad_norm": 2.0 + 5e-5}, profile=fp32.after(2)))
    one_token = np.where(np.arange(5) == 3, OLD + np.float32(2e-4), OLD)
    assert failed(update(logprobs={"old_logprobs": one_token, "ref_logprobs": None}, profile=fp32)) == [
        ("logprobs", "old_logprobs"),
        ("logprobs", "old_logprobs, mean"),
    ]


def test_rewards_are_compared_number_by_number_and_say_where():
    same = records()
    assert not failed(compare_rewards(same, Scores(same.rewards, {"math": same.rewards}), EXACT))
    other = np.array([[1.0, 0.25], [0.5, math.nan]])
    checks = compare_rewards(same, Scores(other, {"math": other}), EXACT)
    assert failed(checks) == [("rewards", "total"), ("rewards", "math")]
    assert checks[0].detail == "prompt 0, sample 1: recorded 0.0, replayed 0.25"
    unscored = np.array([[1.0, math.nan], [0.5, math.nan]])
    (check, _) = compare_rewards(same, Scores(unscored, {"math": same.rewards}), PROFILES["bfloat16"])
    assert not check.ok and check.as_dict()["difference"] is None


def test_responses_are_compared_up_to_the_first_other_token():
    same, other = records(), records()
    assert not failed(compare_responses(same, other.groups, EXACT))
    other.groups[0].responses[0] = Response([5, 4], [-0.5, -9.0])
    ids, logprobs = compare_responses(same, other.groups, EXACT)
    assert not ids.ok and ids.difference == pytest.approx(1 / 3)
    assert ids.detail == "prompt 0, sample 0, token 1: recorded 6, sampled 4"
    assert logprobs.ok and logprobs.compared == 4  # -9.0 belongs to another token
    other.groups[1].responses[0] = Response([8], [-2.5])
    ids, logprobs = compare_responses(same, other.groups, EXACT)
    assert ids.difference == pytest.approx(2 / 3) and logprobs.difference == 0.5


def test_the_first_difference_is_of_the_earliest_step_then_the_earliest_rung():
    def check(step: int, rung: str, ok: bool = False) -> Check:
        return Check(step, rung, rung, ok, 1.0, 0.0, 1)

    checks = [check(3, "rewards"), check(2, "weights"), check(2, "loss"), check(1, "responses", ok=True)]
    found = first_difference(checks)
    assert found is not None and (found.step, found.rung) == (2, "loss")
    assert first_difference([check(1, rung, ok=True) for rung in RUNGS]) is None


def test_the_report_names_the_rung_and_the_numbers():
    checks = [check.as_dict() for check in update(metrics=METRICS | {"actor/lr": 2e-3})]
    result = {
        "step": 7, "state": "the starting weights", "profile": "equal bits", "why": "same device", "notes": ["a note"],
        "checks": checks, "pass": False, "first_difference": next(c for c in checks if not c["ok"]),
    }  # fmt: skip
    stream = io.StringIO()
    print_report(result, Console(file=stream, width=100))
    text = stream.getvalue()
    assert "actor/lr differs" in text and "a note" in text
    assert "step 7 differs first in its learning rate: actor/lr (recorded 0.001, replayed 0.002)" in text
