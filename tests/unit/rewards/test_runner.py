"""Scoring whole steps."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
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

def calls(responses, rows, config):
    return [float(len(responses))] * len(responses)

def counter(responses, rows, config):
    with open(config["log"], "a") as log:
        log.write("".join(f"{r};" for r in responses))
    return [{"score": float(len(r)), "twice": 2.0 * len(r)} for r in responses]

def facts(responses, rows, config):
    return [float(row["num_tokens"] * 100 + (row["finish_reason"] == "length")) for row in rows]

def sleeps(responses, rows, config):
    import time
    for r in responses:
        time.sleep(60 if "hang" in r else 0)
    return [1.0] * len(responses)

def stuck_in_c(responses, rows, config):
    for r in responses:
        if "hang" in r:
            len(str(7 ** (10 ** 8)))  # one call into the interpreter's C code; no signal handler runs meanwhile
    return [1.0] * len(responses)

def swallows(responses, rows, config):
    import time
    while "hang" in responses[0]:
        try:
            time.sleep(60)
        except BaseException:
            pass
    return [1.0]

def dies(responses, rows, config):
    import os
    if "die" in responses[0]:
        os._exit(3)
    return [1.0]

def exits(responses, rows, config):
    raise SystemExit(2)

attempts = 0

def flaky(responses, rows, config):
    global attempts
    attempts += 1
    if attempts < 2:
        raise ConnectionError("not yet")
    return [1.0] * len(responses)

async def remote(responses, rows, config):
    import asyncio
    await asyncio.sleep(60 if "hang" in responses[0] else 0.4)
    return [1.0] * len(responses)

def multitask_reward(responses, data, config):
    scores = []
    for resp, item in zip(responses, data):
        task = item['task']
        if task == "math":
            score = 0.1
        elif task == "code":
            score = 0.2
        else:
            score = 0.3
        scores.append(score)
    return scores
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(SOURCE)
    return f"{tmp_path}/mine.py"


def group(uid: int, texts: list[str], **row: object) -> Group:
    responses = [Response(token_ids=[1] * len(text), logprobs=[0.0] * len(text), text=text) for text in texts]
    return Group(Prompt(uid=uid, input_ids=[1], text="?", row={"response": "4", **row}), responses)


@pytest.fixture(params=[0, 1], ids=["in process", "worker"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Scorer]]:
    """Scorers of the given entries, in this process and in workers; closed at the end."""
    made: list[Scorer] = []

    def scorer(*entries: object, **fields: object) -> Scorer:
        more = {key: fields.pop(key) for key in ("max_response_length", "local") if key in fields}
        values = {"functions": list(entries), "num_workers": request.param, **fields}
        made.append(Scorer(RewardConfig.model_validate(values), **more))  # type: ignore[arg-type]
        return made[-1]

    yield scorer
    for one in made:
        one.close()


def test_total_is_the_weighted_sum_and_none_is_left_out(source: str, make: Callable[..., Scorer]) -> None:
    entries = (
        {"name": f"{source}:length", "weight": 2.0, "options": {"scale": 0.5}},
        {"name": f"{source}:only_long", "weight": 10.0},
    )
    scores = make(*entries).score([group(0, ["ab", "abcd"]), group(1, ["abc", "a"])])
    np.testing.assert_allclose(scores.total, [[2.0, 14.0], [13.0, 1.0]])
    np.testing.assert_allclose(scores.parts["length"], [[1.0, 2.0], [1.5, 0.5]])
    np.testing.assert_allclose(scores.parts["only_long"], [[math.nan, 1.0], [1.0, math.nan]])
    np.testing.assert_allclose(scores.weights["only_long"], [10.0, 10.0])
    assert scores.counts["none"] == 2
    assert scores.counts["errors"] == 0


def test_failed_function_leaves_the_response_unscored(source: str, make: Callable[..., Scorer]) -> None:
    scores = make(f"{source}:length", f"{source}:fails_on_x").score([group(0, ["x", "yy"])])
    np.testing.assert_allclose(scores.total, [[math.nan, 3.0]])
    assert scores.counts["errors"] == 1
    assert scores.counts["fails_on_x/errors"] == 1


def test_response_that_no_function_scores_is_nan(source: str, make: Callable[..., Scorer]) -> None:
    scores = make(f"{source}:only_long").score([group(0, ["a", "abc"])])
    np.testing.assert_allclose(scores.total, [[math.nan, 1.0]])


@pytest.mark.parametrize(("function", "message"), [("raises", "KeyError: 'gone'"), ("short", "1 values for 2 resp")])
def test_first_error_of_a_kind_is_logged_with_its_traceback(
    source: str, make: Callable[..., Scorer], function: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    scorer = make({"name": f"{source}:{function}", "batch": True})
    with caplog.at_level(logging.WARNING):
        scores = scorer.score([group(0, ["a", "b"]), group(1, ["c", "d"])])
    assert scores.counts["errors"] == 4
    assert np.isnan(scores.total).all()
    assert len(caplog.records) == 1
    assert message in caplog.text
    assert "Traceback" in caplog.text


def test_on_error_raise_stops(source: str, make: Callable[..., Scorer]) -> None:
    scorer = make(f"{source}:raises", on_error="raise")
    with pytest.raises(RewardError, match=r"(?s)'raises'.*KeyError"):
        scorer.score([group(0, ["a", "b"])])


def test_function_sees_its_own_row(source: str, make: Callable[..., Scorer]) -> None:
    groups = [group(5, ["a", "b"], number=7), group(6, ["c"], number=8)]
    scores = make(f"{source}:sees").score(groups)
    np.testing.assert_allclose(scores.total, [[7.0, 7.0], [8.0, math.nan]])


def test_facts_about_the_response_come_on_request(source: str, make: Callable[..., Scorer]) -> None:
    asked = group(0, ["abc"])
    asked.responses[0].finish_reason = "length"
    entry = {"name": f"{source}:facts", "include": ["num_tokens", "finish_reason"]}
    assert make(entry).score([asked]).total[0, 0] == 301.0
    scores = make(f"{source}:facts").score([asked])
    assert scores.counts["errors"] == 1


def test_one_call_per_response_unless_batch(source: str, make: Callable[..., Scorer]) -> None:
    one = {"name": f"{source}:calls", "label": "one"}
    all_together = {"name": f"{source}:calls", "label": "all", "batch": True}
    scores = make(one, all_together).score([group(0, ["a", "b", "c"])])
    np.testing.assert_allclose(scores.parts["one"], [[1.0, 1.0, 1.0]])
    np.testing.assert_allclose(scores.parts["all"], [[3.0, 3.0, 3.0]])


def test_groups_may_arrive_in_any_order(source: str, make: Callable[..., Scorer]) -> None:
    scorer = make(f"{source}:length")
    scorer.submit(1, group(1, ["abc"]))
    scorer.submit(0, group(0, ["a"]))
    np.testing.assert_allclose(scorer.collect().total, [[1.0], [3.0]])
    np.testing.assert_allclose(scorer.score([group(2, ["ab"])]).total, [[2.0]])


def test_named_parts_of_math_are_details(make: Callable[..., Scorer]) -> None:
    options = {"weights": {"format": 0.5, "answer": 0.5}}
    scores = make({"name": "math", "options": options}).score([group(0, ["\\boxed{4}", "\\boxed{5}"])])
    np.testing.assert_allclose(scores.total, [[0.5, 0.0]])
    np.testing.assert_allclose(scores.details["math/answer"], [[1.0, 0.0]])
    np.testing.assert_allclose(scores.details["math/format"], [[0.0, 0.0]])
    assert scores.summary()["math_rewards/answer"] == 0.5
    assert scores.summary()["math_rewards/mean"] == 0.25


def test_misspelt_reward_is_refused_at_once(make: Callable[..., Scorer]) -> None:
    with pytest.raises(ValueError, match="did you mean 'math'"):
        make("mth")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "no_such_module_xyz:one"}, "does not import"),
        ({"name": "math", "options": {"wieghts": 1}}, r"reward 'math': option 'wieghts' is unknown"),
    ],
)
def test_what_cannot_be_loaded_is_an_error_of_ready(
    make: Callable[..., Scorer], entry: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(entry).ready()


def test_equal_responses_are_scored_once_and_remembered(
    source: str, make: Callable[..., Scorer], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    entry = {"name": f"{source}:counter", "cache": True, "options": {"log": str(log)}}
    scorer = make(entry, cache_path=str(tmp_path / "cache.sqlite"))
    np.testing.assert_allclose(scorer.score([group(0, ["a", "bb", "a"])]).total, [[1.0, 2.0, 1.0]])
    again = scorer.score([group(1, ["bb", "a", "ccc"])])
    np.testing.assert_allclose(again.total, [[2.0, 1.0, 3.0]])
    np.testing.assert_allclose(again.details["counter/twice"], [[4.0, 2.0, 6.0]])
    assert sorted(log.read_text().split(";")) == ["", "a", "bb", "ccc"]
    scorer.score([group(2, ["a"], number=1)])  # another row
    assert log.read_text().count("a;") == 2
    scorer.close()
    make(entry, cache_path=str(tmp_path / "cache.sqlite")).score([group(3, ["a", "dd"])])
    assert log.read_text().endswith("dd;")
    assert log.read_text().count("a;") == 2


def test_functions_of_users_are_not_cached_unless_asked(
    source: str, make: Callable[..., Scorer], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    make({"name": f"{source}:counter", "options": {"log": str(log)}}).score([group(0, ["a", "a"])])
    assert log.read_text() == "a;a;"


def test_the_seeds_multitask_function_works_unchanged(source: str, make: Callable[..., Scorer]) -> None:
    groups = [group(0, ["x"], task="math"), group(1, ["x"], task="code"), group(2, ["x"], task="chat")]
    scores = make(f"{source}:multitask_reward").score(groups)
    np.testing.assert_allclose(scores.total, [[0.1], [0.2], [0.3]])


def test_tasks_route_rows_to_their_functions(source: str, make: Callable[..., Scorer]) -> None:
    tasks = {
        "math": ["answer"],
        "code": [{"name": f"{source}:length", "weight": 3.0}],
        "default": [f"{source}:only_long"],
    }
    scorer = make("format", tasks=tasks)
    text = "<think>x</think><answer>4</answer>"
    groups = [group(0, [text, "4"], task="math"), group(1, ["ab", text], task="code"), group(2, ["a", "abc"])]
    scores = scorer.score(groups)
    np.testing.assert_allclose(scores.total, [[2.0, 0.0], [6.0, 3.0 * len(text) + 1], [0.0, 1.0]])
    np.testing.assert_allclose(scores.weights["length"], [0.0, 3.0, 0.0])
    assert scores.tasks == ["math", "code", "default"]
    summary = scores.summary()
    assert summary["task/math/reward"] == 1.0
    assert summary["task/math/std"] == pytest.approx(math.sqrt(2.0))
    assert summary["only_long_rewards/none"] == 1.0
    assert scorer.check_rows([{"task": "code"}, {"task": "else"}, {}]) == {"code": 1, "else": 1, "default": 1}


def test_task_without_a_route_is_an_error(make: Callable[..., Scorer]) -> None:
    scorer = make(tasks={"math": ["answer"], "code": ["format"]}, task_key="kind")
    with pytest.raises(ValueError, match=r"kind='maths'; routed tasks: math, code.*2 of maths, 1 of None"):
        scorer.check_rows([{"kind": "maths"}, {"kind": "math"}, {"kind": "maths"}, {"problem": 1}])
    with pytest.raises(ValueError, match="no value in column 'kind'"):
        scorer.score([group(0, ["a"])])


def test_equal_labels_in_one_route_are_an_error(make: Callable[..., Scorer]) -> None:
    with pytest.raises(ValueError, match=r"reward.tasks.math: two functions are called 'format'"):
        make("format", tasks={"math": ["format"], "code": ["answer"]})


def test_local_function_gets_everything_in_one_call(source: str, make: Callable[..., Scorer]) -> None:
    seen: list[tuple[int, str]] = []

    def on_device(responses: list[str], rows: list[dict[str, object]], config: dict[str, object]) -> list[float]:
        seen.append((len(responses), threading.current_thread().name))
        return [len(text) + float(config["add"]) for text in responses]  # type: ignore[arg-type]

    entry = {"name": "reward_model", "options": {"add": 0.5}}
    scorer = make(entry, f"{source}:length", local={"reward_model": on_device})
    scores = scorer.score([group(0, ["a", "bb"]), group(1, ["ccc", "dddd"])])
    np.testing.assert_allclose(scores.parts["reward_model"], [[1.5, 2.5], [3.5, 4.5]])
    assert seen == [(4, "MainThread")]
    assert [row["form"] for row in scorer.ready()] == ["local", "covey"]


def test_retry_after_an_exception(source: str, make: Callable[..., Scorer]) -> None:
    scores = make({"name": f"{source}:flaky", "retries": 1, "batch": True}).score([group(0, ["a", "b"])])
    np.testing.assert_allclose(scores.total, [[1.0, 1.0]])


def test_async_calls_of_a_group_run_together(source: str, make: Callable[..., Scorer]) -> None:
    scorer = make({"name": f"{source}:remote", "timeout_s": 2.0})
    scorer.ready()
    begin = time.perf_counter()
    scores = scorer.score([group(0, ["a", "b", "hang", "c", "d", "e"])])
    np.testing.assert_allclose(scores.total, [[1.0, 1.0, math.nan, 1.0, 1.0, 1.0]])
    assert scores.counts["timeouts"] == 1
    assert time.perf_counter() - begin < 3.0


def test_python_hang_is_a_timeout_of_that_response(source: str, make: Callable[..., Scorer]) -> None:
    scorer = make({"name": f"{source}:sleeps", "timeout_s": 0.3})
    begin = time.perf_counter()
    scores = scorer.score([group(0, ["a", "hang", "b"])])
    np.testing.assert_allclose(scores.total, [[1.0, math.nan, 1.0]])
    assert (scores.counts["timeouts"], scores.counts["errors"]) == (1, 0)
    assert time.perf_counter() - begin < 10.0


def workers(*entries: object, **fields: object) -> Scorer:
    return Scorer(RewardConfig.model_validate({"functions": list(entries), "num_workers": 1, **fields}))


@pytest.mark.parametrize("function", ["stuck_in_c", "swallows"])
def test_hang_that_no_signal_ends_kills_the_worker(source: str, function: str) -> None:
    scorer = workers({"name": f"{source}:{function}", "timeout_s": 0.2})
    scorer.ready()
    begin = time.perf_counter()
    scores = scorer.score([group(0, ["a", "hang", "b"]), group(1, ["c"])])
    np.testing.assert_allclose(scores.total, [[1.0, math.nan, 1.0], [1.0, math.nan, math.nan]])
    assert (scores.counts["timeouts"], scores.counts["errors"]) == (1, 0)
    assert time.perf_counter() - begin < 8.0
    scorer.close()


def test_worker_that_dies_is_an_error_of_that_response(source: str, caplog: pytest.LogCaptureFixture) -> None:
    scorer = workers(f"{source}:dies")
    scores = scorer.score([group(0, ["a", "die", "b"])])
    np.testing.assert_allclose(scores.total, [[1.0, math.nan, 1.0]])
    assert scores.counts["errors"] == 1
    assert "exit code 3" in caplog.text
    scorer.close()


def test_sys_exit_in_a_function_is_an_error(
    source: str, make: Callable[..., Scorer], caplog: pytest.LogCaptureFixture
) -> None:
    assert make(f"{source}:exits").score([group(0, ["a", "b"])]).counts["errors"] == 2
    assert "SystemExit" in caplog.text


def test_closing_leaves_no_process(source: str) -> None:
    scorer = workers({"name": f"{source}:swallows", "timeout_s": 60.0})
    scorer.ready()
    scorer.submit(0, group(0, ["hang"]))
    pool = scorer._pool
    assert pool is not None
    [worker] = pool._workers
    time.sleep(0.2)
    assert worker.process.poll() is None
    scorer.close()
    assert worker.process.poll() == -9


def test_scoring_overlaps_what_the_caller_does(source: str) -> None:
    scorer = workers({"name": f"{source}:remote"})
    scorer.ready()
    begin = time.perf_counter()
    scorer.submit(0, group(0, ["a"]))
    assert time.perf_counter() - begin < 0.2
    time.sleep(0.8)
    waited = time.perf_counter()
    scorer.collect()
    assert time.perf_counter() - waited < 0.2
    assert scorer.seconds >= 0.8  # from the submit, whoever else did something meanwhile
    scorer.close()
