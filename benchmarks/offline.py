"""Models, prompts and a reward for benchmarks: made here, no download. A word is a token, so a prompt of P words has P.

Run by compare_trl.py; both sides get the same directory, the same prompts and the same scores.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


@dataclass(frozen=True)
class Size:
    """A Qwen2 with tied embeddings."""

    vocab: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int

    @property
    def matmuls(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the matrices that every token runs through, head left out."""
        head_dim = self.width // self.heads
        layer = [
            (self.width, self.width),
            (self.width, self.kv_heads * head_dim),
            (self.width, self.kv_heads * head_dim),
            (self.width, self.width),
            (self.width, self.inner),
            (self.width, self.inner),
            (self.inner, self.width),
        ]
        return layer * self.layers


SIZES = {
    "31.5M": Size(vocab=49152, width=384, inner=1024, layers=8, heads=6, kv_heads=2),
    "31.5M, vocabulary 152k": Size(vocab=151936, width=384, inner=1024, layers=8, heads=6, kv_heads=2),
    "0.8M": Size(vocab=128, width=128, inner=384, layers=4, heads=4, kv_heads=2),
}


def make_tokenizer(directory: Path, size: Size) -> None:
    """Write a tokenizer whose tokens are the words `w2 w3 ...`. Beside Qwen2 weights it would be read as Qwen2's."""
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, size.vocab)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    special = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)


def make_model(directory: Path, size: Size) -> None:
    """Write untrained weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size.vocab,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


def make_prompts(path: Path, *, count: int, length: int, vocab: int) -> list[str]:
    """Write rows of `problem`, `length` random words each, and return the texts."""
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(2, vocab)}" for _ in range(length)) for _ in range(count)]
    path.write_text("".join(json.dumps({"problem": text}) + "\n" for text in texts), encoding="utf-8")
    return texts


def score(text: str) -> float | None:
    """Share of even digits: differs within a group, costs next to nothing."""
    digits = [letter for letter in text if letter.isdigit()]
    return sum(digit in "02468" for digit in digits) / max(len(digits), 1)


def reward(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[float | None]:
    """`score` as Covey calls it."""
    return [score(text) for text in responses]
