"""The `judge` reward: a language model behind an OpenAI-compatible endpoint grades responses.

One request per response (`POST URL/chat/completions`), several at a time, each with a time limit and retries for what
may pass (connection errors, 408, 429, 5xx). The grade is read from JSON in the answer, `{"score": 7}`, or from the last
number in it. A grade that cannot be read, or lies outside the range, is an error of that response, never a zero.

Standard library only. The key comes from an environment variable, so that no configuration file holds it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from covey.rewards.base import Score, read_options

_PROMPT = """Grade the answer to a task from {low} (worthless) to {high} (right and complete).

# Task
{prompt}

# Reference answer
{reference}

# Answer to grade
{response}

Say in one sentence what is right and what is wrong. Then give the grade as JSON: {{"score": <number>}}"""

_OPTIONS = {
    "url": None,
    "model": None,
    "key_variable": "OPENAI_API_KEY",
    "prompt": _PROMPT,
    "low": 0.0,
    "high": 10.0,
    "scale": True,
    "temperature": 0.0,
    "max_tokens": 512,
    "request_s": 30.0,
    "attempts": 3,
    "pause_s": 1.0,
    "concurrency": 8,
}
_PASSING = (408, 429, 500, 502, 503, 504)
_MAX_ANSWER_BYTES = 2**20


async def judge_reward(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[Score]:
    """The judge's grade, scaled to [0, 1] unless `scale` is false.

    Options: `url` (up to and with /v1) and `model` (both required), `key_variable` (environment variable with the key,
    when the server wants one), `prompt` (a format string with prompt, response, reference, low, high), `low`, `high`,
    `temperature`, `max_tokens`, `request_s` (time limit of one request, seconds), `attempts`, `pause_s` (before the
    second attempt; doubles), `concurrency` (requests at once of one reward worker).
    """
    options = read_options(config, _OPTIONS)
    if not options["url"] or not options["model"] or options["low"] >= options["high"]:
        raise ValueError("judge needs the options url and model, and low below high")
    loop, threads = asyncio.get_running_loop(), _threads(options["concurrency"])
    calls = [
        loop.run_in_executor(threads, _grade, fill_prompt(text, row, options), options)
        for text, row in zip(responses, rows, strict=True)
    ]
    return list(await asyncio.gather(*calls))


def fill_prompt(response: str, row: dict[str, Any], options: dict[str, Any]) -> str:
    """What the judge is asked about one response."""
    prompt = row.get("prompt", row.get("problem", ""))
    if isinstance(prompt, list):
        prompt = "\n\n".join(str(message.get("content", "")) for message in prompt)
    reference = row.get("response") or "(none given)"
    return options["prompt"].format(
        prompt=prompt, response=response, reference=reference, low=options["low"], high=options["high"]
    )


def read_grade(answer: str, *, low: float, high: float) -> float:
    """The grade in a judge's answer; ValueError when there is none in [low, high]."""
    found = None
    for match in re.finditer(r"\{[^{}]*\}", answer):
        try:
            value = json.loads(match[0])
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("score"), (int, float, str)):
            found = value["score"]
    if found is None:
        numbers = re.findall(r"-?\d+(?:\.\d+)?", answer)
        found = numbers[-1] if numbers else None
    try:
        grade = float(found)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"the judge gave no grade: {answer[-200:]!r}") from None
    if not (math.isfinite(grade) and low <= grade <= high):
        raise ValueError(f"the judge's grade {grade} is not in [{low}, {high}]: {answer[-200:]!r}")
    return grade


@lru_cache(maxsize=4)
def _threads(concurrency: int) -> ThreadPoolExecutor:
    """Threads for requests, shared by all calls in this process."""
    return ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="judge")


def _grade(prompt: str, options: dict[str, Any]) -> float:
    answer = _ask(prompt, options)
    grade = read_grade(answer, low=options["low"], high=options["high"])
    return (grade - options["low"]) / (options["high"] - options["low"]) if options["scale"] else grade


def _ask(prompt: str, options: dict[str, Any]) -> str:
    """The text of the judge's answer; the last error when every attempt failed."""
    request = _request(prompt, options)
    attempt = 1
    while True:
        try:
            with urllib.request.urlopen(request, timeout=options["request_s"]) as reply:
                body = json.loads(reply.read(_MAX_ANSWER_BYTES))
            return str(body["choices"][0]["message"]["content"])
        except urllib.error.HTTPError as error:
            with error:
                text = error.read(300).decode(errors="replace")
            if error.code not in _PASSING or attempt >= options["attempts"]:
                raise ConnectionError(f"{options['url']} answered {error.code}: {text}") from None
        except (OSError, ValueError, LookupError) as error:
            if attempt >= options["attempts"]:
                raise ConnectionError(f"{options['url']}: {type(error).__name__}: {error}") from error
        time.sleep(options["pause_s"] * 2 ** (attempt - 1))
        attempt += 1


def _request(prompt: str, options: dict[str, Any]) -> urllib.request.Request:
    body = {
        "model": options["model"],
        "messages": [{"role": "user", "content": prompt}],
        "temperature": options["temperature"],
        "max_tokens": options["max_tokens"],
    }
    headers = {"Content-Type": "application/json"}
    key = os.environ.get(options["key_variable"])
    if key:
        headers["Authorization"] = f"Bearer {key}"
    url = options["url"].rstrip("/") + "/chat/completions"
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"judge: url={options['url']!r} is neither http nor https")
    return urllib.request.Request(url, json.dumps(body).encode(), headers)
