"""Reward functions in the form of other trainers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from covey.rewards.adapters import adapt

ROWS: list[dict[str, Any]] = [
    {"prompt": "p1", "response": "4", "level": 1},
    {"prompt": "p2", "response": "5", "level": 2},
]
CHAT = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]


def test_trl_with_columns_by_name() -> None:
    def accuracy(prompts: list[str], completions: list[str], level: list[int], **kwargs: Any) -> list[float | None]:
        assert prompts == ["p1", "p2"]
        assert kwargs["response"] == ["4", "5"]
        return [None if c == "?" else float(x) for c, x in zip(completions, level, strict=True)]

    adapted = adapt(accuracy)
    assert adapted.form == "trl"
    assert adapted.call(["a", "?"], ROWS, {}) == [1.0, None]


def test_trl_without_kwargs_gets_only_what_it_names() -> None:
    def accuracy(completions: list[str], response: list[str]) -> list[float]:
        return [float(c == r) for c, r in zip(completions, response, strict=True)]

    assert adapt(accuracy).call(["4", "4"], ROWS, {}) == [1.0, 0.0]


def test_trl_completions_are_messages_when_the_prompt_is() -> None:
    def contents(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
        return [float(len(c[0]["content"])) for c in completions]

    assert adapt(contents).call(["abc", "d"], CHAT, {}) == [3.0, 1.0]


def test_async_trl() -> None:
    async def late(completions: list[str], **kwargs: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(c)) for c in completions]

    adapted = adapt(late)
    assert adapted.is_async
    assert asyncio.run(adapted.call(["ab", "c"], ROWS, {})) == [2.0, 1.0]


def test_verl_is_called_per_response() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        right = solution_str == ground_truth
        return {"score": float(right), "acc": right, "pred": solution_str} if data_source == "a" else float(right)

    rows = [
        {"data_source": "a", "reward_model": {"ground_truth": "7", "style": "rule"}, "response": "no"},
        {"data_source": "b", "response": "5", "extra_info": {"split": "train"}},
    ]
    adapted = adapt(compute_score)
    assert adapted.form == "verl"
    assert adapted.call(["7", "6"], rows, {}) == [{"score": 1.0, "acc": True}, 0.0]


def test_mindspeed() -> None:
    def verifier(sequences: list[str], answers: list[str], tool_call_nums: list[int], *args: Any) -> list[float]:
        return [float(s == a) + n for s, a, n in zip(sequences, answers, tool_call_nums, strict=True)]

    adapted = adapt(verifier)
    assert adapted.form == "mindspeed"
    assert adapted.call(["4", "4"], ROWS, {}) == [1.0, 0.0]


def test_options_become_keyword_arguments() -> None:
    def scaled(completions: list[str], scale: float = 1.0) -> list[float]:
        return [scale * len(c) for c in completions]

    assert adapt(scaled).call(["ab"], ROWS[:1], {"scale": 0.5}) == [1.0]
    with pytest.raises(ValueError, match=r"options \['scael'\] are no parameters"):
        adapt(scaled).call(["ab"], ROWS[:1], {"scael": 0.5})


def test_covey_form_is_positional_whatever_the_names() -> None:
    def multitask_reward(responses: list[str], data: list[dict[str, Any]], config: dict[str, Any]) -> list[float]:
        return [float(item["level"]) for item in data]

    adapted = adapt(multitask_reward)
    assert adapted.form == "covey"
    assert adapted.call(["a", "b"], ROWS, {}) == [1.0, 2.0]


def test_callable_object() -> None:
    class Length:
        def __call__(self, responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[float]:
            return [float(len(r)) for r in responses]

    assert adapt(Length()).call(["ab"], [{}], {}) == [2.0]


def test_other_parameters_name_the_known_forms() -> None:
    def wrong(text: str) -> float:
        return 0.0

    with pytest.raises(ValueError, match=r"TRL.*verl.*MindSpeed-RL.*this one takes \(text\)"):
        adapt(wrong)
