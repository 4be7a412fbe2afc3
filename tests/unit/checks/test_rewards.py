"""Rewards that cannot teach anything, each by what is wrong with it."""

from __future__ import annotations

import pytest

from covey.checks.rewards import check_rewards


@pytest.fixture
def reward(place, make):
    """The finding for a reward whose body is given."""

    def find(body: str, **settings):
        (place / "mine.py").write_text(f"def score(responses, rows, config):\n    {body}\n")
        entry = {"name": f"{place / 'mine.py'}:score", **settings.pop("entry", {})}
        return check_rewards(make(reward={"functions": [entry], **settings}))

    return find


def test_a_reward_that_knows_the_reference_is_fine(make):
    found = check_rewards(make())
    assert found.severity == "ok" and found.evidence["rows"] == 16
    assert found.evidence["reference_mean"] > 0.9 and found.evidence["empty_mean"] == 0.0


def test_a_bare_answer_is_tried_in_the_form_that_the_reward_wants(place, make):
    """The reward reads \\boxed{...}; the reference column has the number alone."""
    rows = ['{"problem": "2+2=", "answer": "4"}', '{"problem": "2+3=", "answer": "5"}']
    (place / "train.jsonl").write_text("\n".join(rows) + "\n")
    assert check_rewards(make(train={"batch_size": 2})).severity == "ok"


def test_a_constant_reward_is_found(reward):
    found = reward("return [0.5 for _ in responses]")
    assert found.severity == "warning" and "every reward is constant" in found.found


def test_a_reward_that_scores_nothing_is_found(reward):
    found = reward("return [None for _ in responses]")
    assert found.severity == "failure" and found.evidence["unscored_share"] == 1.0


def test_a_reward_that_scores_few_rows_is_found(reward):
    found = reward("return [0.5 + len(r) / 1000 if 'think>\\n\\n' in r else None for r in responses]")
    assert found.severity == "warning" and "more than half is unscored" in found.found


def test_a_reward_that_raises_is_found(reward):
    body = "return [1 / len(r) for r in responses]"  # an empty text
    found = reward(body)
    assert found.severity == "warning" and found.evidence["errors"] == 16
    found = reward(body, on_error="raise")
    assert found.severity == "failure" and "on_error" in found.fix


def test_scores_outside_their_range_are_found(reward):
    body = "return [10.0 * len(r) for r in responses]"
    found = reward(body)
    assert found.severity == "warning" and "outside the declared range" in found.found
    assert reward(body, entry={"range": [0, 2000]}).severity == "ok"


def test_a_reward_with_the_wrong_sign_is_found(reward):
    found = reward("return [1.0 if not r else 0.0 for r in responses]")
    assert found.severity == "warning" and "an empty text scores higher" in found.found


def test_rewards_that_ask_a_model_are_not_tried(make):
    found = check_rewards(make(reward={"functions": [{"name": "math"}, {"name": "judge"}]}))
    assert found.severity == "skipped" and found.found == "judge asks a model"
