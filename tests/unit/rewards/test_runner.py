"""Scoring whole steps."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest

from covey.config.schema import RewardConfig
from covey.rewards.runner import RewardError, Scorer
from covey.types import Group, Prompt, Response

SOURCE = """
def length(responses, rows, config):
    return [float(len(r)) * config.get("scale", 1.0) for r in responses]

def only_long(responses, rows, config):
    return [None if len(r) < 3 else 1.0 for r in responses]

def fails_on_x(responses, rows, config):
    return [float("nan") if "x" in r else 1.0 for r in responses]

def raises(responses, rows, config):
    raise KeyError("gone")

def short(responses, rows, config):
    return [1.0]

def sees(responses, rows, config):
    return [float(row["number"]) for row in rows]
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(SOURCE)
    return f"{tmp_path}/mine.py"


def group(uid: int, texts: list[str], **row: object) -> Group:
    responses = [Response(token_ids=[1] * len(text), logprobs=[0.0] * len(text), text=text) for text in texts]
    return Group(Prompt(uid=uid, input_ids=[1], text="?", row={"response": "4", **row}), responses)


def config(*entries: dict[str, object], **fields: object) -> RewardConfig:
    return RewardConfig.model_validate({"functions": list(entries), **fields})


def test_total_is_the_weighted_sum_and_none_is_left_out(source: str) -> None:
    entries = (
        {"name": f"{source}:length", "weight": 2.0, "options": {"scale": 0.5}},
        {"name": f"{source}:only_long", "weight": 10.0},
    )
    scores = Scorer(config(*entries)).score([group(0, ["ab", "abcd"]), group(1, ["abc", "a"])])
    np.testing.assert_allclose(scores.total, [[2.0, 14.0], [13.0, 1.0]])
    np.testing.assert_allclose(scores.parts[f"{source}:length"], [[1.0, 2.0], [1.5, 0.5]])
    np.testing.assert_allclose(scores.parts[f"{source}:only_long"], [[math.nan, 1.0], [1.0, math.nan]])
    np.testing.assert_allclose(scores.weights[f"{source}:only_long"], [10.0, 10.0])
    assert scores.counts["none"] == 2
    assert scores.counts["errors"] == 0


def test_failed_function_leaves_the_response_unscored(source: str) -> None:
    scorer = Scorer(config({"name": f"{source}:length"}, {"name": f"{source}:fails_on_x"}))
    scores = scorer.score([group(0, ["x", "yy"])])
    np.testing.assert_allclose(scores.total, [[math.nan, 3.0]])
    assert scores.counts["errors"] == 1
    assert scores.counts[f"{source}:fails_on_x/errors"] == 1


def test_response_that_no_function_scores_is_nan(source: str) -> None:
    scores = Scorer(config({"name": f"{source}:only_long"})).score([group(0, ["a", "abc"])])
    np.testing.assert_allclose(scores.total, [[math.nan, 1.0]])


@pytest.mark.parametrize(("function", "message"), [("raises", "KeyError: 'gone'"), ("short", "1 values for 2 resp")])
def test_first_error_of_a_kind_is_logged_with_its_traceback(
    source: str, function: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    scorer = Scorer(config({"name": f"{source}:{function}"}))
    with caplog.at_level(logging.WARNING):
        scores = scorer.score([group(0, ["a", "b"]), group(1, ["c", "d"])])
    assert scores.counts["errors"] == 4
    assert np.isnan(scores.total).all()
    assert len(caplog.records) == 1
    assert message in caplog.text
    assert "Traceback" in caplog.text


def test_on_error_raise_stops(source: str) -> None:
    scorer = Scorer(config({"name": f"{source}:raises"}, on_error="raise"))
    with pytest.raises(RewardError, match=r"mine\.py:raises.*KeyError"):
        scorer.score([group(0, ["a", "b"])])


def test_function_sees_its_own_row(source: str) -> None:
    scores = Scorer(config({"name": f"{source}:sees"})).score(
        [group(5, ["a", "b"], number=7), group(6, ["c"], number=8)]
    )
    np.testing.assert_allclose(scores.total, [[7.0, 7.0], [8.0, math.nan]])


def test_groups_may_arrive_in_any_order(source: str) -> None:
    scorer = Scorer(config({"name": f"{source}:length"}))
    scorer.submit(1, group(1, ["abc"]))
    scorer.submit(0, group(0, ["a"]))
    np.testing.assert_allclose(scorer.collect().total, [[1.0], [3.0]])
    np.testing.assert_allclose(scorer.score([group(2, ["ab"])]).total, [[2.0]])


def test_named_parts_of_math_are_details() -> None:
    options = {"weights": {"format": 0.5, "answer": 0.5}}
    scores = Scorer(config({"name": "math", "options": options})).score([group(0, ["\\boxed{4}", "\\boxed{5}"])])
    np.testing.assert_allclose(scores.total, [[0.5, 0.0]])
    np.testing.assert_allclose(scores.details["math/answer"], [[1.0, 0.0]])
    np.testing.assert_allclose(scores.details["math/format"], [[0.0, 0.0]])


def test_unknown_reward_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="did you mean 'math'"):
        Scorer(config({"name": "mth"}))
