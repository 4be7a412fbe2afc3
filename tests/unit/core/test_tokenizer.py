"""A tokenizer.json is honoured, whatever class transformers chooses for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from covey.data import workers
from covey.models.load import load_tokenizer
from covey.tokenizer import PROBES, first_difference, read_tokenizer
from covey.tools import tiny

WORDS = ["<pad>", "<eos>", "<unk>", "hello", "world", ","]


@pytest.fixture
def custom(tmp_path: Path) -> Path:
    """A word-level tokenizer beside qwen2 weights, which transformers reads as Qwen2's byte-level one."""
    tiny.make_model(tmp_path / "model", seed=0)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    words.normalizer = normalizers.Lowercase()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        chat_template="{{ messages[0].content }}",
    ).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_custom_tokenizer_is_read_as_its_file_says(custom: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert AutoTokenizer.from_pretrained(custom)("Hello world, x", add_special_tokens=False).input_ids != [3, 4, 5, 2]
    tokenizer = load_tokenizer(str(custom))
    assert tokenizer("Hello world, x", add_special_tokens=False).input_ids == [3, 4, 5, 2]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<eos>", "<pad>")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"
    assert "Qwen2Tokenizer" in caplog.text and "Covey goes by tokenizer.json" in caplog.text


def test_what_is_saved_again_is_read_the_same_way(custom: Path, tmp_path: Path) -> None:
    load_tokenizer(str(custom)).save_pretrained(tmp_path / "again")
    shutil.copy(custom / "config.json", tmp_path / "again")
    assert load_tokenizer(str(tmp_path / "again"))("world", add_special_tokens=False).input_ids == [4]


def test_a_tokenizer_of_the_family_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.make_model(tmp_path, seed=0)
    assert type(load_tokenizer(str(tmp_path))).__name__ == "Qwen2Tokenizer"
    assert not caplog.text


def test_a_checkpoint_keeps_it(custom: Path, tmp_path: Path) -> None:
    """Export reads the tokenizer of a checkpoint and writes it again."""
    tokenizer = read_tokenizer(custom)
    for directory in (tmp_path / "once", tmp_path / "twice"):
        shutil.copytree(custom, directory)
        tokenizer.save_pretrained(directory)
        tokenizer = read_tokenizer(directory)
    assert tokenizer("hello world", add_special_tokens=False).input_ids == [3, 4]


def test_preprocessing_reads_it_too(custom: Path) -> None:
    assert workers.load_tokenizer(str(custom))("hello", add_special_tokens=False).input_ids == [3]


def test_every_probe_tells_some_tokenizers_apart() -> None:
    """Each is text that a lower-casing word tokenizer cannot have as Qwen2's bytes."""
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    bytes_ = tiny.make_tokenizer()
    assert first_difference(words, bytes_) is not None
    assert first_difference(bytes_.backend_tokenizer, bytes_) is None
    assert all(len(bytes_(probe, add_special_tokens=False).input_ids) > 10 for probe in PROBES)


def test_a_tokenizer_that_only_treats_one_kind_of_text_otherwise_is_noticed() -> None:
    """Qwen2's composes accents (NFC); the same without it differs on decomposed ones alone."""
    tokenizer = tiny.make_tokenizer()
    changed = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    changed.normalizer = normalizers.Sequence([])  # pyright: ignore[reportAttributeAccessIssue]
    difference = first_difference(changed, tokenizer)
    assert difference is not None and "caf" in difference
