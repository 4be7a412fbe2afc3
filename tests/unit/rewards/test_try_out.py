"""`covey reward try`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from covey.rewards.try_out import report_text, run

CONFIG = """
model: {path: nowhere}
data: {train: rows.jsonl, prompt_key: question, response_key: gold}
reward:
  num_workers: 0
  tasks:
    math: [math]
    default: [format]
output_dir: out
"""
ROWS = [
    {"question": "2+2?", "gold": "<think>2+2=4</think><answer>\\boxed{4}</answer>", "task": "math"},
    {"question": "Say hi", "gold": "hi"},
]


def write(directory: Path, *, rows: list[Any] | None = None, responses: list[Any] | None = None) -> dict[str, Any]:
    (directory / "run.yaml").write_text(CONFIG)
    (directory / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows or ROWS))
    if responses is not None:
        (directory / "r.jsonl").write_text("\n".join(json.dumps(one) for one in responses))
    return run(directory / "run.yaml", directory / "rows.jsonl", directory / "r.jsonl" if responses else None)


def test_reference_and_nothing_are_tried_without_responses(tmp_path: Path) -> None:
    result = write(tmp_path)
    [right, nothing] = result["rows"][0]["responses"]
    assert right["scores"]["math"] == right["total"] > 0.8
    assert right["parts"]["math/answer"] == 1.0
    assert (nothing["response"], nothing["total"]) == ("", 0.0)
    assert result["rows"][1]["responses"][0]["scores"] == {"format": 0.0}
    assert result["summary"]["math_rewards/answer"] == 0.5


def test_given_responses_are_scored_in_order(tmp_path: Path) -> None:
    form = "<think>a</think><answer>b</answer>"
    result = write(tmp_path, responses=[{"responses": ["\\boxed{5}", "\\boxed{4}"]}, {"response": form}])
    assert [r["parts"]["math/answer"] for r in result["rows"][0]["responses"]] == [0.0, 1.0]
    assert result["rows"][1] == {
        "row": 1,
        "task": "default",
        "responses": [{"response": form, "total": 1.0, "scores": {"format": 1.0}, "parts": {}}],
    }
    text = report_text(result)
    assert "math = " in text
    assert "answer 1.00" in text
    assert "failures: none" in text


@pytest.mark.parametrize(
    ("rows", "responses", "message"),
    [
        (["text"], None, r"rows.jsonl:1: a str instead of an object"),
        ([{"q": 1}], None, r"row 0 has no column data.prompt_key='question'; has \['q'\]"),
        (None, [{"response": "a"}], "1 entries for 2 rows"),
        (None, [{"response": 1}, {"response": "b"}], "entry 1 has neither"),
    ],
)
def test_files_that_do_not_fit_are_named(
    tmp_path: Path, rows: list[Any] | None, responses: list[Any] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path, rows=rows, responses=responses)
