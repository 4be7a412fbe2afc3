"""`covey show` against a written step."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from covey.rollout.records import write_records
from covey.tools.show import show
from covey.types import Group, Prompt, Response

NAN = math.nan


@pytest.fixture
def run(tmp_path: Path) -> Path:
    groups = [
        Group(
            Prompt(uid=70 + p, input_ids=[1, 2], text=f"[bold]What is {p}+1?", row={"answer": p + 1, "odd": NAN}),
            [
                Response([1, 2, 3], [-0.5, -1.0, -1.5], text=f"It is {p + 1}.", finish_reason="stop", policy_version=4),
                Response([1], [-0.25], text="x" * 900 + "END", finish_reason="length", policy_version=4),
            ],
        )
        for p in range(6)
    ]
    rewards = np.array([[1.0, 0.0]] * 5 + [[0.5, NAN]])
    for step in (1, 2, 3, 5):
        write_records(tmp_path, step, groups, rewards + step, {"math": rewards}, np.array([[0.7, -0.7]] * 6))
    return tmp_path


def shown(run: Path, *arguments: object, width: int = 120, **options: object) -> str:
    stream = io.StringIO()
    show(run, *arguments, console=Console(file=stream, width=width), **options)  # type: ignore[arg-type]
    return stream.getvalue()


def test_group_stands_under_its_prompt_with_its_numbers(run: Path):
    text = shown(run, 2)
    assert "step 2: 6 prompts, 12 responses, mean reward 2.500, mean length 2.0" in text
    assert "[bold]What is 3+1?" in text  # a prompt is text, not markup
    row = next(line for line in text.splitlines() if "It is 4." in line)
    assert row.replace("│", " ").split() == ["0", "3", "1", "+0.7", "3", "It", "is", "4."]
    cut = next(line for line in text.splitlines() if "1>" in line)
    assert cut.replace("│", " ").split()[:5] == ["1", "2", "0", "-0.7", "1>"]
    assert "4 of 6 prompts" in text
    assert "prompt 4" not in text


def test_long_response_keeps_its_end_and_one_prompt_is_whole(run: Path):
    assert "END" in shown(run, 1)
    assert shown(run, 1).count("x") < 2400
    whole = shown(run, 1, prompt=5)
    assert whole.count("x") == 900
    assert "prompt 5 (uid 75)" in whole
    assert "prompt 0" not in whole


def test_last_step_and_every_prompt(run: Path):
    text = shown(run, limit=0)
    assert "step 5" in text
    assert all(f"prompt {p} (uid {70 + p})" in text for p in range(6))


def test_unscored_is_a_dash(run: Path):
    row = next(line for line in shown(run, 1, prompt=5).splitlines() if "1>" in line)
    assert row.replace("│", " ").split()[:4] == ["1", "-", "-", "-0.7"]


def test_terminal_codes_of_a_model_are_shown_not_sent(tmp_path: Path):
    response = Response([1], [-1.0], text="\x1b[2Jgone\x07\nnext")
    group = Group(Prompt(uid=0, input_ids=[1], text="p"), [response])
    write_records(tmp_path, 1, [group], np.ones((1, 1)), {}, np.zeros((1, 1)))
    text = shown(tmp_path)
    assert "\\x1b[2Jgone\\x07" in text
    assert not set(text) & {"\x1b", "\x07"}


def test_json_is_strict_and_complete(run: Path, capsys: pytest.CaptureFixture[str]):
    show(run, 3, json=True, prompt=5)
    value = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (value["step"], value["num_prompts"], len(value["groups"])) == (3, 6, 1)
    group = value["groups"][0]
    assert (group["prompt"], group["uid"], group["row"]) == (5, 75, {"answer": 6, "odd": None})
    assert group["responses"][0] == {
        "text": "It is 6.",
        "num_tokens": 3,
        "finish_reason": "stop",
        "policy_version": 4,
        "reward": 3.5,
        "scores": {"math": 0.5},
        "advantage": 0.7,
        "mean_logprob": -1.0,
    }
    assert group["responses"][1]["reward"] is None


def test_errors_say_what_there_is(run: Path, tmp_path_factory: pytest.TempPathFactory):
    with pytest.raises(ValueError, match="step 4 is not recorded; there are 1-3, 5"):
        show(run, 4)
    with pytest.raises(ValueError, match="prompts 0 to 5, no prompt 6"):
        show(run, 1, prompt=6)
    with pytest.raises(ValueError, match=r"no such directory"):
        show(run / "missing", 1)
    with pytest.raises(ValueError, match=r"logging\.records"):
        show(tmp_path_factory.mktemp("empty"), 1)
