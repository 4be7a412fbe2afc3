"""Checks before the first step: evaluation.pass_on must name a reward or a part of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from covey.config.schema import RewardConfig
from covey.data.prompts import PromptSet
from covey.preflight import check_pass_on
from covey.rewards.runner import Scorer

ANSWER = "<think>2 and 2</think><answer>\\boxed{4}</answer>"


@pytest.fixture
def scorer(tmp_path: Path) -> Iterator[Scorer]:
    """`format` for every row, `math` with its parts for one task alone; `broken` has no opinion on anything."""
    (tmp_path / "mine.py").write_text("def broken(responses, rows, config):\n    return [None for _ in responses]\n")
    functions: list[Any] = ["format", f"{tmp_path}/mine.py:broken"]
    config = RewardConfig.model_validate(
        {"functions": functions, "tasks": {"add": ["math"], "other": []}, "num_workers": 0}
    )
    scorer = Scorer(config, max_response_length=8)
    yield scorer
    scorer.close()


def prompts() -> PromptSet:
    rows = [
        {"task": task, "response": ANSWER, "prompt_text": "2+2", "input_ids": [1]} for task in ("other", "other", "add")
    ]
    return PromptSet(pa.Table.from_pylist(rows), source="rows", prompt_type="empty")


@pytest.mark.parametrize("name", [None, "format", "math", "math/answer", "math/reasoning"])
def test_a_reward_or_a_part_of_one_is_accepted(scorer: Scorer, name: str | None) -> None:
    check_pass_on(name, scorer, prompts(), "task")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("maths", "'maths' is neither a reward nor a part of one, did you mean 'math'"),
        ("maths/answer", "known: format, broken, math"),
        ("math/anwser", "did you mean 'math/answer'"),
        ("format/answer", "'format/answer' is neither"),
    ],
)
def test_a_typo_is_named_with_what_is_known(scorer: Scorer, name: str, words: str) -> None:
    with pytest.raises(ValueError, match="evaluation.pass_on") as caught:
        check_pass_on(name, scorer, prompts(), "task")
    assert words in str(caught.value)


def test_a_part_of_a_reward_that_scores_nothing_cannot_be_checked(
    scorer: Scorer, caplog: pytest.LogCaptureFixture
) -> None:
    check_pass_on("broken/part", scorer, prompts(), "task")
    assert "'broken/part' was not checked" in caplog.text


def test_without_a_probe_only_the_rewards_name_is_checked(scorer: Scorer) -> None:
    check_pass_on("math/anwser", scorer, prompts(), "task", probe=False)
    with pytest.raises(ValueError, match="maths/answer"):
        check_pass_on("maths/answer", scorer, prompts(), "task", probe=False)


def test_the_check_leaves_nothing_to_collect(scorer: Scorer) -> None:
    check_pass_on("math/answer", scorer, prompts(), "task")
    assert scorer.collect().total.shape == (0, 0)
