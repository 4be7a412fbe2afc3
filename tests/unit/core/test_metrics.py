"""Metrics against numbers worked by hand, and the table against its rules."""

import math

import numpy as np
import pytest

from covey import metrics
from covey.types import Group, Prompt, Response

NAN = float("nan")


def group(prompt_length: int, lengths: list[int], reasons: list[str]) -> Group:
    responses = [
        Response(token_ids=[1] * n, logprobs=[0.0] * n, finish_reason="length" if reason == "length" else "stop")
        for n, reason in zip(lengths, reasons, strict=True)
    ]
    return Group(Prompt(uid=0, input_ids=[1] * prompt_length, text=""), responses)


def summary(**changes: object) -> dict[str, float]:
    arguments: dict = {
        "groups": [group(3, [2, 4], ["stop", "length"]), group(5, [1, 3], ["stop", "stop"])],
        "rewards": np.array([[1.0, 0.0], [0.5, NAN]]),
        "parts": {"math": np.array([[1.0, 0.0], [0.0, NAN]]), "format": np.array([[NAN, NAN], [NAN, NAN]])},
        "advantages": np.array([[1.0, -1.0], [0.0, 0.0]]),
        "timings": {"all": 4.0, "rollout": 2.0, "update": 1.0},
        "update": {"actor/grad_norm": 0.25},
        "world_size": 2,
    }
    arguments.update(changes)
    return metrics.summarize(arguments.pop("groups"), arguments.pop("rewards"), **arguments)


def test_summary_equals_numbers_worked_by_hand():
    values = summary()
    # Tokens with each prompt counted per response: (3+2) + (3+4) + (5+1) + (5+3) = 26, on 2 devices 13 each.
    expected = {
        "timing/all": 4.0,
        "timing/rollout": 2.0,
        "timing/update": 1.0,
        "prompt_length/mean": 4.0,
        "prompt_length/max": 5.0,
        "prompt_length/min": 3.0,
        "response_length/mean": 2.5,
        "response_length/max": 4.0,
        "response_length/min": 1.0,
        "grpo/score/mean": 0.5,
        "grpo/score/max": 1.0,
        "grpo/score/min": 0.0,
        "math_rewards/mean": 1 / 3,
        "reward/none_share": 0.25,
        "group/zero_variance_share": 0.5,
        "advantage/mean": 0.0,
        "advantage/max": 1.0,
        "advantage/min": -1.0,
        "rollout/truncated_share": 0.25,
        "e2e_tps": 13 / 4,
        "update_tps": 13.0,
        "vllm_tps": 6.5,
        "rollout/generated_tps": 5 / 2,
        "actor/grad_norm": 0.25,
    }
    assert values == pytest.approx(expected)


def test_nothing_scored_leaves_score_out_instead_of_writing_nan():
    values = summary(rewards=np.full((2, 2), NAN))
    assert "grpo/score/mean" not in values
    assert values["reward/none_share"] == 1.0
    assert values["group/zero_variance_share"] == 1.0
    assert not any(math.isnan(value) for value in values.values())


def test_group_with_spread_is_not_zero_variance():
    assert summary(rewards=np.array([[1.0, 0.0], [0.5, 0.4]]))["group/zero_variance_share"] == 0.0


def test_smaller_group_does_not_count_as_unscored():
    values = summary(
        groups=[group(3, [2, 4], ["stop", "length"]), group(5, [1], ["stop"])],
        rewards=np.array([[1.0, NAN], [0.5, NAN]]),
        advantages=np.array([[1.0, -1.0], [3.0, 0.0]]),
    )
    assert values["reward/none_share"] == pytest.approx(1 / 3)
    assert values["advantage/mean"] == 1.0


def test_name_outside_the_table_is_an_error_with_the_nearest():
    with pytest.raises(ValueError, match=r"'actor/gradnorm'.*actor/grad_norm"):
        summary(update={"actor/gradnorm": 1.0})
    with pytest.raises(ValueError, match="timing/rolout"):
        summary(timings={"all": 1.0, "rolout": 1.0})


@pytest.mark.parametrize("name", ["eval/pass@8", "eval/math_rewards/mean", "my.module:fn_rewards/mean", "actor/lr"])
def test_families_are_declared_by_pattern(name: str):
    metrics.check_names([name])


@pytest.mark.parametrize("name", ["eval/pass@k", "eval/pass@", "_rewards/mean", "eval/reward/x", "Actor/lr"])
def test_families_are_no_wildcards(name: str):
    with pytest.raises(ValueError, match="not declared"):
        metrics.check_names([name])


def test_reference_lists_every_metric_once():
    rows = [line for line in metrics.reference().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == list(metrics.METRICS)
    # A bar inside a cell would split it: five unescaped bars make four cells.
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
