"""The tiny model, tokenizer and rows: read back as a user of Hugging Face would, sums checked by Python."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from covey.tools import tiny


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny.make_model(directory, seed=3)
    return directory


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    files = tiny.make_data(tmp_path_factory.mktemp("data"), seed=3, tasks=tiny.TASKS)
    return {name: _read(path) for name, path in vars(files).items()}


def test_the_saved_tokenizer_gives_back_every_text(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    text = "<think>7+8=15\n4+3=8</think><answer>\\boxed{85}</answer>" + string.printable.strip() + " πr² 面积"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert max(ids) < len(tokenizer)


def test_the_saved_tokenizer_has_one_token_a_tag_and_a_digit(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer.tokenize("<think>15</think><answer>\\boxed{8}</answer>") == [
        *("<think>", "1", "5", "</think>", "<answer>", "\\boxed", "{", "8", "}", "</answer>")
    ]


def test_the_model_fits_its_tokenizer_and_comes_from_the_seed(model_dir: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    before = torch.get_rng_state()
    for seed, same in ((3, True), (4, False)):
        tiny.make_model(tmp_path / str(seed), seed)
        other = AutoModelForCausalLM.from_pretrained(tmp_path / str(seed))
        assert torch.equal(model.model.embed_tokens.weight, other.model.embed_tokens.weight) is same
    assert torch.equal(torch.get_rng_state(), before)


def test_no_problem_is_in_two_files(rows: dict[str, list[dict[str, Any]]]) -> None:
    asked = {name: {row.get("problem") or row["prompt"] for row in rows[name]} for name in rows}
    assert [len(asked[name]) for name in ("sft", "train", "eval")] == [
        *(3 * tiny.NUM_SFT, 3 * tiny.NUM_TRAIN, 3 * tiny.NUM_EVAL)
    ]
    assert len(asked["sft"] | asked["train"] | asked["eval"]) == sum(len(problems) for problems in asked.values())
    assert len(rows["train"] + rows["eval"]) == len(asked["train"] | asked["eval"])


def test_reference_answers_are_right(rows: dict[str, list[dict[str, Any]]]) -> None:
    arithmetic = [row for row in rows["train"] + rows["eval"] if row["task"] != "code"]
    for row in arithmetic:
        steps, boxed = _parts(row["answer"])
        assert boxed == _value(row["problem"].rstrip("="))
        assert all(_value(left) == int(right) for left, right in steps)
        assert row["task"] == ("add" if "+" in row["problem"] else "subtract")
        assert row["labels"] == [1.0]


def test_reference_programs_pass_the_tests_of_their_rows(rows: dict[str, list[dict[str, Any]]]) -> None:
    programs = [row for row in rows["train"] + rows["eval"] if row["task"] == "code"]
    assert len(programs) == tiny.NUM_TRAIN + tiny.NUM_EVAL
    for row in programs:
        match = re.fullmatch(r"f\(x\)=(\d+)x([+-]\d+)", row["problem"])
        assert match is not None
        source = re.fullmatch(r"<think></think><answer>(def f\(x\): return [-+*x0-9]+)</answer>", row["answer"])
        assert source is not None
        names: dict[str, Any] = {}
        exec(source[1], names)
        assert names["f"](5) == 5 * int(match[1]) + int(match[2])
        for test in row["tests"]:
            exec(test, names)


def test_half_of_the_demonstrated_programs_multiply_as_the_problem_does(rows: dict[str, list[dict[str, Any]]]) -> None:
    programs = [row["response"] for row in rows["sft"] if row["prompt"].startswith("f(x)")]
    as_written = sum("*" not in response for response in programs) / len(programs)
    assert 0.4 < as_written < 0.6
    assert 0.2 < sum(any(r.count(tag) != 1 for tag in tiny.TAGS[:4]) for r in programs) / len(programs) < 0.5


def test_most_demonstrations_are_flawed_and_some_are_right(rows: dict[str, list[dict[str, Any]]]) -> None:
    def flaw(prompt: str, response: str) -> str:
        box = re.search(r"\\boxed\{(\d+)\}", response)
        if box is None or int(box[1]) != _value(prompt.rstrip("=")):
            return "wrong"
        if any(response.count(tag) != 1 for tag in tiny.TAGS):
            return "tags"
        return "" if re.search(r"\d=\d", response) else "no work"

    sums = [row for row in rows["sft"] if row["prompt"].endswith("=")]
    flaws = Counter(flaw(row["prompt"], row["response"]) for row in sums)
    assert all(count > 0.1 * flaws.total() for count in flaws.values()), flaws
    assert 0.25 < flaws[""] / flaws.total() < 0.5


def test_rows_come_from_the_seed(rows: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    assert _read(tiny.make_data(tmp_path / "same", seed=3, tasks=tiny.TASKS).sft) == rows["sft"]
    assert _read(tiny.make_data(tmp_path / "other", seed=4, tasks=tiny.TASKS).eval) != rows["eval"]


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _value(expression: str) -> int:
    """Of numbers joined by + and -, added up one by one."""
    return sum(int(term) for term in re.findall(r"[+-]?\d+", expression))


def _parts(answer: str) -> tuple[list[tuple[str, str]], int]:
    match = re.fullmatch(r"<think>(.*)</think><answer>\\boxed\{(\d+)\}</answer>", answer, re.DOTALL)
    assert match is not None, answer
    steps = [line.split("=") for line in match[1].split("\n")]
    return [(left, right) for left, right in steps], int(match[2])
