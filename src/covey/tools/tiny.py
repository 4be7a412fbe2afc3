"""A model that fits in a thousandth of a gigabyte, its tokenizer, and arithmetic to teach it: made here, from a seed.

For the quickstart and for trying a set-up without a download. The model is a Qwen2 of 0.6M parameters with random
weights; the tokenizer has one token a byte and one for each tag; together they are an ordinary Hugging Face
directory. The rows have the columns `problem`, `answer`, `task`, `labels`; answers are worked digit by digit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAGS = ("<think>", "</think>", "<answer>", "</answer>", "\\boxed")
NUM_EVAL, NUM_TRAIN, NUM_SFT = 64, 800, 1600  # rows per task

# How often a demonstration goes wrong, and how. A model that imitates them goes wrong as often.
FORGET_CARRY, SLIP, NO_WORK, BAD_TAG = 0.5, 0.1, 0.1, 0.4


@dataclass(frozen=True)
class DataFiles:
    """The three files of make_data; no problem is in two of them."""

    sft: Path  # prompt, response: demonstrations, many of them wrong
    train: Path  # problem, answer, task, labels
    eval: Path  # the same columns, held out


def make_model(directory: Path, seed: int) -> None:
    """Write an untrained model and its tokenizer to `directory`. Qwen2, 3 layers, width 128, 4 heads on 2 keys."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
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


def make_data(directory: Path, seed: int) -> DataFiles:
    """Write the rows of every task, shuffled together. Held-out problems are in no other file, nor demonstrated."""
    rng = random.Random(seed)
    sft: list[dict[str, Any]] = []
    train: list[dict[str, Any]] = []
    held_out: list[dict[str, Any]] = []
    for task, pairs in TASKS.items():
        chosen = rng.sample(pairs, NUM_EVAL + NUM_TRAIN + NUM_SFT)
        held_out += [_row(task, a, b) for a, b in chosen[:NUM_EVAL]]
        train += [_row(task, a, b) for a, b in chosen[NUM_EVAL : NUM_EVAL + NUM_TRAIN]]
        sft += [
            {"prompt": problem(task, a, b), "response": demonstration(task, a, b, rng)}
            for a, b in chosen[NUM_EVAL + NUM_TRAIN :]
        ]
    files = DataFiles(directory / "sft.jsonl", directory / "train.jsonl", directory / "eval.jsonl")
    directory.mkdir(parents=True, exist_ok=True)
    for path, rows in ((files.sft, sft), (files.train, train), (files.eval, held_out)):
        rng.shuffle(rows)
        _write(path, rows)
    return files


TASKS: dict[str, list[tuple[int, int]]] = {  # task -> every pair of numbers it can ask about
    "add": [(a, b) for a in range(10, 60) for b in range(10, 60)],
    "subtract": [(a, b) for a in range(10, 90) for b in range(10, a + 1)],
}


def problem(task: str, a: int, b: int) -> str:
    """For example `47+38=`."""
    return f"{a}{'+' if task == 'add' else '-'}{b}="


def solution(task: str, a: int, b: int) -> str:
    r"""Worked and right: `<think>7+8=15\n4+3+1=8</think><answer>\boxed{85}</answer>`."""
    return _worked(task, a, b, carry=True, slip=(0, 0))


def demonstration(task: str, a: int, b: int, rng: random.Random) -> str:
    """A solution as a careless pupil writes it: forgets the carry, slips, skips the work, or leaves out a tag."""
    carry = rng.random() >= FORGET_CARRY
    ones, tens = (rng.choice((-1, 1)) if rng.random() < SLIP else 0 for _ in range(2))
    text = _worked(task, a, b, carry=carry, slip=(ones, tens))
    if rng.random() < NO_WORK:
        text = f"<think></think><answer>{text.split('<answer>')[1]}"
    if rng.random() < BAD_TAG:
        text = text.replace(rng.choice(("<think>", "</think>", "</answer>")), "")
    return text


def _worked(task: str, a: int, b: int, *, carry: bool, slip: tuple[int, int]) -> str:
    """Ones first, then tens with the carry; `slip` is added to the two results, kept in what they can be."""
    if task == "add":
        carried = a % 10 + b % 10 >= 10
        ones = min(18, max(0, a % 10 + b % 10 + slip[0]))
        tens = min(19, max(0, a // 10 + b // 10 + (carried and carry) + slip[1]))
        first = f"{a % 10}+{b % 10}={ones}"
        second = f"{a // 10}+{b // 10}{'+1' if carried and carry else ''}={tens}"
    else:
        carried = a % 10 < b % 10
        top = a % 10 + 10 * carried
        ones = min(9, max(0, top - b % 10 + slip[0]))
        tens = min(9, max(0, a // 10 - b // 10 - (carried and carry) + slip[1]))
        first = f"{top}-{b % 10}={ones}"
        second = f"{a // 10}-{b // 10}{'-1' if carried and carry else ''}={tens}"
    return f"<think>{first}\n{second}</think><answer>\\boxed{{{10 * tens + ones % 10}}}</answer>"


def _row(task: str, a: int, b: int) -> dict[str, Any]:
    return {"problem": problem(task, a, b), "answer": solution(task, a, b), "task": task, "labels": [1.0]}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
