"""A model that fits in a thousandth of a gigabyte, its tokenizer, and tasks to teach it: made here, from a seed.

For the quickstart and for trying a set-up without a download. The model is a Qwen2 of 0.5M parameters with random
weights; the tokenizer has one token a byte and one for each tag; together they are an ordinary Hugging Face
directory. The rows have the columns `problem`, `answer`, `task`, `labels`, and `tests` where the answer is a program;
sums and differences are worked digit by digit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAGS = ("<think>", "</think>", "<answer>", "</answer>", "\\boxed")
NUM_EVAL, NUM_TRAIN, NUM_SFT = 50, 200, 400  # problems per task
NUM_DEMONSTRATIONS = 3  # per problem of NUM_SFT

# How often a demonstration goes wrong, and how. A model that imitates them goes wrong as often.
FORGET_CARRY, SLIP, NO_WORK, BAD_TAG, AS_WRITTEN = 0.5, 0.05, 0.3, 0.35, 0.5


@dataclass(frozen=True)
class DataFiles:
    """The three files of make_data; no problem is in two of them."""

    sft: Path  # prompt, response: demonstrations, most of them flawed
    train: Path  # problem, answer, task, labels, and tests of a program
    eval: Path  # the same columns, held out


def make_model(directory: Path, seed: int) -> None:
    """Write an untrained model and its tokenizer to `directory`. Qwen2, 2 layers, width 128, 4 heads on 2 keys."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.08,  # of this width; the usual 0.02 learns a third slower
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_tokenizer() -> Any:
    """One token a byte, and one for each of TAGS; `<eos>` ends a response.

    It is of the class that transformers loads for a Qwen2 model, whatever class was saved.
    """
    from tokenizers import pre_tokenizers
    from transformers import AddedToken, Qwen2Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: i for i, word in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=[], eos_token="<eos>", pad_token="<pad>", unk_token="<eos>", model_max_length=512
    )
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def make_data(directory: Path, seed: int, tasks: Iterable[str] = ("add", "subtract")) -> DataFiles:
    """Write the rows of the tasks, shuffled together. Held-out problems are in no other file, nor demonstrated."""
    rng = random.Random(seed)
    sft: list[dict[str, Any]] = []
    train: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    for task in tasks:
        chosen = rng.sample(TASKS[task], NUM_EVAL + NUM_TRAIN + NUM_SFT)
        held_out += [_row(task, a, b) for a, b in chosen[:NUM_EVAL]]
        train += [_row(task, a, b) for a, b in chosen[NUM_EVAL : NUM_EVAL + NUM_TRAIN]]
        sft += [
            {"prompt": problem(task, a, b), "response": demonstration(task, a, b, rng)}
            for a, b in chosen[NUM_EVAL + NUM_TRAIN :]
            for _ in range(NUM_DEMONSTRATIONS)
        ]
    files = DataFiles(directory / "sft.jsonl", directory / "train.jsonl", directory / "eval.jsonl")
    directory.mkdir(parents=True, exist_ok=True)
    for path, rows in ((files.sft, sft), (files.train, train), (files.eval, held_out)):
        rng.shuffle(rows)
        _write(path, rows)
    return files


# Digits 2 to 7 alone: few enough facts to learn in a minute, and two sums of five have a carry.
_NUMBERS = [10 * tens + ones for tens in range(2, 8) for ones in range(2, 8)]
TASKS: dict[str, list[tuple[int, int]]] = {  # task -> every pair of numbers it can ask about
    "add": [(a, b) for a in _NUMBERS for b in _NUMBERS],
    "subtract": [(a, b) for a in _NUMBERS for b in _NUMBERS if a >= b],
    "code": [(a, b) for a in _NUMBERS for b in (*_NUMBERS, *(-n for n in _NUMBERS))],
}


def problem(task: str, a: int, b: int) -> str:
    """For example `47+38=`, or `f(x)=47x-38` for which a Python function is asked."""
    if task == "code":
        return f"f(x)={a}x{b:+}"
    return f"{a}{'+' if task == 'add' else '-'}{b}="


def solution(task: str, a: int, b: int) -> str:
    r"""Worked and right: `<think>7+8=15\n4+3=7\n7+1=8</think><answer>\boxed{85}</answer>`, or a program."""
    if task == "code":
        return _program(f"{a}*x{b:+}")
    return _worked(task, a, b, carry=True, slip=(0, 0))


def demonstration(task: str, a: int, b: int, rng: random.Random) -> str:
    """A solution as a careless pupil writes it: forgets the carry, slips, skips the work, or leaves out a tag.

    In a program: multiplies as it is written in the problem, which is not Python.
    """
    if task == "code":
        return _without_a_tag(_program(f"{a}{'' if rng.random() < AS_WRITTEN else '*'}x{b:+}"), rng)
    carry = rng.random() >= FORGET_CARRY
    ones, tens = (rng.choice((-1, 1)) if rng.random() < SLIP else 0 for _ in range(2))
    text = _worked(task, a, b, carry=carry, slip=(ones, tens))
    if rng.random() < NO_WORK:
        text = f"<think></think><answer>{text.split('<answer>')[1]}"
    return _without_a_tag(text, rng)


def _program(expression: str) -> str:
    return f"<think></think><answer>def f(x): return {expression}</answer>"


def _without_a_tag(text: str, rng: random.Random) -> str:
    """The text, or now and then without one of its tags."""
    if rng.random() < BAD_TAG:
        text = text.replace(rng.choice(("<think>", "</think>", "</answer>")), "")
    return text


def _worked(task: str, a: int, b: int, *, carry: bool, slip: tuple[int, int]) -> str:
    """Ones, then tens, then the carry if there is one; `slip` is added to the two results, kept in what they can be."""
    sign, top = ("+", a % 10) if task == "add" else ("-", a % 10 + 10 * (a % 10 < b % 10))
    largest = 18 if task == "add" else 9
    results = [x + y if task == "add" else x - y for x, y in ((top, b % 10), (a // 10, b // 10))]
    carried = results[0] >= 10 if task == "add" else top >= 10
    ones, tens = (min(largest, max(0, result + extra)) for result, extra in zip(results, slip, strict=True))
    lines = [f"{top}{sign}{b % 10}={ones}", f"{a // 10}{sign}{b // 10}={tens}"]
    if carried and carry:
        tens, before = max(0, tens + (1 if task == "add" else -1)), tens
        lines.append(f"{before}{sign}1={tens}")
    steps = "\n".join(lines)
    return f"<think>{steps}</think><answer>\\boxed{{{10 * tens + ones % 10}}}</answer>"


def _row(task: str, a: int, b: int) -> dict[str, Any]:
    row = {"problem": problem(task, a, b), "answer": solution(task, a, b), "task": task, "labels": [1.0]}
    if task == "code":
        row["tests"] = [f"assert f({x}) == {a * x + b}" for x in (0, 3, -2)]
    return row


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
