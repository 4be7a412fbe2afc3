"""Planted contradictions between a checkpoint's files and its config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from covey.checks.weights import (
    check_dtype,
    check_norm_eps,
    check_rope,
    check_tied_embeddings,
    check_vocabulary,
    check_weights,
)
from covey.models.load import load_model

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _edit_weights(place: Path, change) -> None:
    path = place / "model" / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, metadata={"format": "pt"})


def test_a_sound_model_has_no_finding(make):
    material = make()
    checks = (check_weights, check_vocabulary, check_tied_embeddings, check_dtype, check_norm_eps, check_rope)
    assert [check(material).severity for check in checks] == ["ok"] * 6


def test_a_missing_bias_is_found(place, make):
    _edit_weights(place, lambda w: w.pop("model.layers.1.self_attn.q_proj.bias"))
    found = check_weights(make())
    assert found.severity == "failure" and found.evidence["missing"] == ["model.layers.1.self_attn.q_proj.bias"]


def test_a_transposed_or_foreign_weight_is_found(place, make):
    def change(w):
        w["model.layers.0.mlp.up_proj.weight"] = w["model.layers.0.mlp.up_proj.weight"].t()

    _edit_weights(place, change)
    assert check_weights(make()).evidence["other_shape"] == ["model.layers.0.mlp.up_proj.weight"]
    _edit_weights(place, change)
    _edit_weights(place, lambda w: w.update({"model.layers.0.mlp.up_proj.bias": torch.zeros(512)}))
    found = check_weights(make())
    assert found.severity == "warning" and found.evidence["without_place"] == ["model.layers.0.mlp.up_proj.bias"]


def test_files_saved_without_the_prefix_of_the_causal_model_are_understood(place, make):
    def change(w):
        for name in list(w):
            w[name.removeprefix("model.")] = w.pop(name)

    _edit_weights(place, change)
    material = make()
    assert [check(material).severity for check in (check_weights, check_vocabulary)] == ["ok", "ok"]


def test_another_vocabulary_size_is_found(place, make, edit_json):
    edit_json(place / "model" / "config.json", vocab_size=300)
    found = check_vocabulary(make())
    assert found.severity == "failure" and found.evidence == {
        "tokenizer": 263, "vocab_size": 300, "embedding_rows": 263,
    }  # fmt: skip


def test_a_tokenizer_with_more_ids_than_the_model_is_found(place, make):
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(place / "model")
    assert check_vocabulary(make()).severity == "failure"


def test_a_stored_head_that_a_tied_model_ignores_is_found(place, make):
    _edit_weights(place, lambda w: w.update({HEAD: w[EMBEDDING].clone()}))
    assert check_tied_embeddings(make()).severity == "ok"  # the embedding once more
    _edit_weights(place, lambda w: w[HEAD][262].add_(1.0))
    found = check_tied_embeddings(make())
    assert found.severity == "failure" and "a head other than the embedding" in found.found


def test_a_head_that_is_not_there_is_found(place, make, edit_json):
    edit_json(place / "model" / "config.json", tie_word_embeddings=False)
    found = check_tied_embeddings(make())
    assert found.severity == "failure" and "no head in the files" in found.found
    assert check_weights(make()).evidence["missing"] == [HEAD]


def test_numbers_of_several_kinds_or_of_float16_are_found(place, make):
    assert check_dtype(make(model={"dtype": "bfloat16"})).severity == "ok"  # fp32 files, as usual

    def change(w):
        w["model.layers.1.mlp.up_proj.weight"] = w["model.layers.1.mlp.up_proj.weight"].bfloat16()

    _edit_weights(place, change)
    found = check_dtype(make())
    assert found.severity == "warning" and found.evidence["files"] == ["BF16", "F32"]
    _edit_weights(place, lambda w: w.update({name: t.half() for name, t in w.items()}))
    assert check_dtype(make()).severity == "ok"
    assert check_dtype(make(model={"dtype": "bfloat16"})).severity == "warning"
    _edit_weights(place, lambda w: w.update({EMBEDDING: torch.zeros(263, 128, dtype=torch.int8)}))
    assert check_dtype(make()).severity == "failure"


def test_shortened_fp32_products_are_found(make):
    material = make()
    torch.set_float32_matmul_precision("high")
    try:
        found = check_dtype(material)
        assert found.severity == "warning" and found.evidence["reduced_precision"]
        assert check_dtype(make()).severity == "ok"  # choosing the device switches it off
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_norm_with_another_epsilon_is_found(place, make, edit_json):
    """The seed's second problem: 1e-6 on one device, 1e-7 on the other."""
    network: Any = load_model(str(place / "model"), dtype=torch.float32, device=torch.device("cpu"))
    assert check_norm_eps(replace(make(), network=network)).severity == "ok"
    network.get_submodule("model.layers.1.input_layernorm").variance_epsilon = 1e-7
    found = check_norm_eps(replace(make(), network=network))
    assert found.severity == "failure" and found.evidence["model"] == [1e-7, 1e-6]
    edit_json(place / "model" / "config.json", rms_norm_eps=None)
    assert check_norm_eps(make()).severity == "warning"  # a default that each program chooses for itself


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"rms_norm_eps": 1e-5}, check_norm_eps),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, check_rope),
    ],
)
def test_a_reference_of_another_family_is_found(sound, place, make, edit_json, changes, check):
    other = {"model": {"ref_path": str(sound / "model")}, "algorithm": {"kl_coef": 0.1}}
    assert check(make(**other)).severity == "ok"
    edit_json(place / "model" / "config.json", **changes)
    assert check(make(**other)).severity == "failure"
    assert check(make()).severity == "ok"


def test_rotary_frequencies_other_than_of_the_base_are_found(place, make):
    network: Any = load_model(str(place / "model"), dtype=torch.float32, device=torch.device("cpu"))
    assert check_rope(replace(make(), network=network)).severity == "ok"
    rotary = network.get_submodule("model.rotary_emb")
    rotary.inv_freq[3] *= 1.01
    found = check_rope(replace(make(), network=network))
    assert found.severity == "failure" and found.evidence["deviation"] == pytest.approx(0.01, rel=1e-3)


def test_a_base_that_is_not_used_is_found(make, place, edit_json):
    edit_json(place / "model" / "config.json", rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    material = make()
    assert check_rope(material).severity == "ok"
    material.model.config.rope_parameters = {"rope_theta": 10000.0, "rope_type": "default"}
    found = check_rope(material)
    assert found.severity == "failure" and "another base is used" in found.found
