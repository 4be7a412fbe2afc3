"""The judge endpoint, against a local server that answers as told."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from covey.config.schema import RewardConfig
from covey.rewards.judge import judge_reward, read_grade
from covey.rewards.runner import Scorer
from covey.types import Group, Prompt, Response

ROW = {"prompt": "2+2?", "response": "4"}


class Server(ThreadingHTTPServer):
    """Answers every request from a rule on the text of the response that it finds in it."""

    requests: list[tuple[str, dict[str, Any], str | None]]
    in_flight = most_in_flight = 0

    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server  # type: ignore[assignment]

    def do_POST(self) -> None:  # noqa: N802 - the name that http.server calls
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        self.server.requests.append((self.path, body, self.headers.get("Authorization")))
        self.server.in_flight += 1
        self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
        seen = sum("flaky" in b["messages"][0]["content"] for _, b, _ in self.server.requests)
        status, answer = 200, 'Fine. {"score": 8}'
        if "flaky" in text and seen < 3:
            status = 503
        elif "forbidden" in text:
            status = 403
        elif "slow" in text:
            time.sleep(0.4)
        elif "mute" in text:
            answer = "I would rather not say."
        self.server.in_flight -= 1
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [{"message": {"content": answer}}]}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), Handler)
    made.requests = []
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def judge(server: Server, responses: list[str], **options: Any) -> list[Any]:
    given = {"url": server.url(), "model": "m", "pause_s": 0.01, **options}
    return asyncio.run(judge_reward(responses, [ROW] * len(responses), given))


def test_request_and_scale(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "k-123")
    assert judge(server, ["it is {4}"], key_variable="MY_KEY") == [0.8]
    assert judge(server, ["it is 4"], scale=False, high=8) == [8.0]
    path, body, key = server.requests[0]
    assert (path, body["model"], body["temperature"], key) == ("/v1/chat/completions", "m", 0.0, "Bearer k-123")
    prompt = body["messages"][0]["content"]
    assert all(part in prompt for part in ("2+2?", "it is {4}", "Reference answer\n4", '{"score": <number>}'))


def test_passing_errors_are_tried_again(server: Server) -> None:
    assert judge(server, ["flaky"]) == [0.8]
    assert len(server.requests) == 3


def test_lasting_errors_are_not(server: Server) -> None:
    with pytest.raises(ConnectionError, match="answered 403"):
        judge(server, ["forbidden"])
    assert len(server.requests) == 1


def test_time_limit_of_a_request(server: Server) -> None:
    with pytest.raises(ConnectionError, match=r"timed out|TimeoutError"):
        judge(server, ["slow"], request_s=0.1, attempts=1)


def test_requests_run_at_once_up_to_the_bound(server: Server) -> None:
    begin = time.perf_counter()
    assert judge(server, ["slow"] * 6, concurrency=3) == [0.8] * 6
    assert time.perf_counter() - begin < 2.0
    assert server.most_in_flight == 3


def test_failures_in_a_run_are_errors_of_their_response(server: Server) -> None:
    options = {"url": server.url(), "model": "m", "pause_s": 0.01}
    config = RewardConfig.model_validate({"functions": [{"name": "judge", "options": options}], "num_workers": 1})
    scorer = Scorer(config)
    texts = ["good", "mute", "forbidden"]
    scores = scorer.score([Group(Prompt(0, [1], "", ROW), [Response([1], [0.0], text) for text in texts])])
    scorer.close()
    np.testing.assert_allclose(scores.total, [[0.8, np.nan, np.nan]])
    assert scores.counts["judge/errors"] == 2


@pytest.mark.parametrize(
    ("answer", "grade"),
    [
        ('{"score": 7}', 7.0),
        ('Well. {"score": "7.5", "why": "x"}', 7.5),
        ('{"score": 1} no, {"score": 2}', 2.0),
        ("{not json} I give it 9", 9.0),
        ("Grade: 3", 3.0),
    ],
)
def test_grade_is_read(answer: str, grade: float) -> None:
    assert read_grade(answer, low=0, high=10) == grade


@pytest.mark.parametrize("answer", ["", "no", '{"score": 11}', '{"score": -1}', '{"score": "high"}', '{"score": NaN}'])
def test_unreadable_grade_is_an_error(answer: str) -> None:
    with pytest.raises(ValueError, match="the judge"):
        read_grade(answer, low=0, high=10)


def test_url_and_model_are_needed() -> None:
    with pytest.raises(ValueError, match="url and model"):
        asyncio.run(judge_reward([], [], {"url": "http://x/v1"}))
