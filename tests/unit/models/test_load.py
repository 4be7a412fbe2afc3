"""Checkpoints that fit are loaded and exported unchanged; those that do not are refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from covey.models.load import check_vocabulary, export_model, load_model, load_tokenizer, prepare_model, stop_ids
from covey.tools import tiny

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "model"
    tiny.make_model(directory, seed=0)
    return directory


def test_weights_go_in_and_out_unchanged(checkpoint: Path, tmp_path: Path) -> None:
    model = load_model(str(checkpoint), dtype=torch.float32, device=CPU)
    export_model(model, load_tokenizer(str(checkpoint)), tmp_path / "out")
    before = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<eos>"
    assert not (tmp_path / "out.tmp").exists()


def test_stop_ids_are_the_union(checkpoint: Path) -> None:
    model: Any = load_model(str(checkpoint), dtype=torch.float32, device=CPU)
    tokenizer = load_tokenizer(str(checkpoint))
    model.generation_config.eos_token_id = [7, 5]
    eos = tokenizer.convert_tokens_to_ids("<eos>")
    assert isinstance(eos, int)
    assert stop_ids(model, tokenizer, extra=[9]) == sorted({5, 7, 9, eos})
    with pytest.raises(ValueError, match=r"\[1000\] are outside"):
        stop_ids(model, tokenizer, extra=[1000])


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(checkpoint: Path) -> None:
    model, tokenizer = load_model(str(checkpoint), dtype=torch.float32, device=CPU), load_tokenizer(str(checkpoint))
    check_vocabulary(model, tokenizer)
    tokenizer.add_tokens(["one more"])
    with pytest.raises(ValueError, match="does not belong to model.path"):
        check_vocabulary(model, tokenizer)


def test_a_family_that_packs_right_passes_the_self_test() -> None:
    prepare_model(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)))


def test_a_family_with_learned_positions_passes_too() -> None:
    """GPT-2 adds position embeddings by position_ids and keeps them out of attention."""
    prepare_model(GPT2LMHeadModel(GPT2Config(vocab_size=104, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0)))


def test_a_model_whose_logits_differ_when_packed_is_refused() -> None:
    class Scaled(MistralForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            assert out.logits is not None
            out.logits = 2 * out.logits
            return out

    with pytest.raises(ValueError, match="gives other logits when packed"):
        prepare_model(Scaled(MistralConfig(**SIZES, sliding_window=None)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, "sliding window"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    ],
)
def test_what_the_attention_cannot_honour_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        prepare_model(Qwen2ForCausalLM(Qwen2Config(**SIZES, **changes)))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda d: d / "modle", "did you mean"),
        (lambda d: d / "model" / "config.json", "is a file"),
        (lambda d: d / "empty", "no config.json"),
        (lambda d: d / "megatron", "Megatron-core checkpoint"),
    ],
)
def test_a_path_that_is_no_checkpoint(checkpoint: Path, tmp_path: Path, make, expected: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(ValueError, match=expected):
        load_model(str(make(tmp_path)), dtype=torch.float32, device=CPU)
