"""Routing by task and scales between tasks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from covey.config.schema import RewardConfig
from covey.rewards.multitask import Router, RunningScale, to_range, zscore
from covey.rewards.runner import Scorer
from covey.types import Group, Prompt, Response


def test_route_of_a_row() -> None:
    router = Router((0,), {"math": (1, 2), "code": (3,)}, "task")
    assert router.route({"task": "math"}) == ("math", (0, 1, 2))
    with pytest.raises(ValueError, match="task='chat'; routed tasks: math, code"):
        router.route({"task": "chat"})
    assert Router((0,), {"math": (1,), "default": ()}, "task").route({"task": "chat"}) == ("chat", (0,))
    assert Router((0,), {}, "task").route({"task": 7}) == ("7", (0,))
    assert Router((0,), {}, "task").route({}) == ("", (0,))


def test_task_column_that_no_row_has_is_an_error_even_with_a_default() -> None:
    router = Router((), {"math": (0,), "default": (1,)}, "tasks")
    with pytest.raises(ValueError, match=r"task_key='tasks': no row has that column, did you mean 'task'"):
        router.check([{"task": "math"}, {"task": "code"}])
    assert router.check([{"tasks": "math"}, {}]) == {"math": 1, "default": 1}


def test_running_zscore_is_that_of_all_rewards_so_far() -> None:
    rng = np.random.default_rng(0)
    scale, seen = RunningScale(), {"a": np.empty(0), "b": np.empty(0)}
    for _ in range(4):
        rewards = rng.normal([[5.0], [100.0], [5.0]], [[1.0], [20.0], [1.0]], size=(3, 6))
        rewards[0, 0] = math.nan
        tasks = ["a", "b", "a"]
        got = zscore(rewards, tasks, scale)
        for row, task in enumerate(tasks):
            known = rewards[row][~np.isnan(rewards[row])]
            seen[task] = np.concatenate([seen[task], known])
        expected = np.stack([(rewards[i] - seen[t].mean()) / seen[t].std() for i, t in enumerate(tasks)])
        np.testing.assert_allclose(got, expected, rtol=1e-10)


def test_task_whose_rewards_are_all_equal_is_only_shifted() -> None:
    got = zscore(np.full((1, 4), 0.3), ["a"], RunningScale())
    np.testing.assert_allclose(got, 0.0, atol=1e-12)


def test_range_puts_the_lowest_at_zero_and_the_highest_at_one() -> None:
    rewards = np.array([[-1.0, 0.0, 1.0], [0.0, 5.0, math.nan]])
    np.testing.assert_allclose(to_range(rewards, [(-1.0, 1.0), (0.0, 10.0)]), [[0.0, 0.5, 1.0], [0.0, 0.5, math.nan]])


def scored(normalization: str) -> tuple[np.ndarray, Scorer]:
    tasks = {"math": [{"name": "acc", "weight": 2.0}, {"name": "repetition", "weight": -1.0}], "text": ["format"]}
    config = RewardConfig.model_validate({"tasks": tasks, "num_workers": 0, "normalization": normalization})
    scorer = Scorer(config)
    groups = [
        Group(
            Prompt(0, [1], "", {"task": "math", "response": "4"}),
            [Response([1], [0.0], t) for t in ("\\boxed{4}", "4")],
        ),
        Group(
            Prompt(1, [1], "", {"task": "text"}),
            [Response([1], [0.0], t) for t in ("<think></think><answer></answer>", "")],
        ),
    ]
    return scorer.normalize(scorer.score(groups)), scorer


def test_range_of_a_task_is_the_weighted_sum_of_its_functions_ranges() -> None:
    np.testing.assert_allclose(scored("none")[0], [[2.0, -2.0], [1.0, 0.0]])
    # acc in [-1, 1] times 2, repetition in [-1, 0] times -1: [-2, 3]
    np.testing.assert_allclose(scored("range")[0], [[4 / 5, 0.0], [1.0, 0.0]])


def test_running_scale_is_kept_in_checkpoints() -> None:
    _, scorer = scored("zscore")
    state = scorer.state_dict()
    fresh = Scorer(RewardConfig.model_validate({"functions": ["format"], "num_workers": 0, "normalization": "zscore"}))
    fresh.load_state_dict(state)
    assert fresh.scale.moments == scorer.scale.moments == {"math": (2.0, 0.0, 8.0), "text": (2.0, 1.0, 1.0)}
