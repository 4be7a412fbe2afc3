"""Adapters against the formula, against peft's own merging and loading, and what is refused."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from covey.models.adapters import (
    add_adapter,
    base_of_adapter,
    default_targets,
    describe_adapter,
    has_adapter,
    is_adapter_directory,
    is_adapter_weight,
    merged_weights,
    restore_adapter,
    save_adapter,
    save_adapter_config,
    without_adapter,
)

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
IDS = torch.arange(2, 20)[None]
EVERY = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def _base(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True, initializer_range=0.2)).eval()


def _adapted(**options: Any) -> Any:
    """A model whose adapter does something."""
    model = _base()
    add_adapter(model, base="base", **{"rank": 3, "alpha": 5, "seed": 1, **options})
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def _adapter(model: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if is_adapter_weight(name)}


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_a_layer_adds_alpha_over_rank_times_b_a_x() -> None:
    model = _adapted()
    layer = model.model.layers[1].mlp.down_proj
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(3))
    weights = dict(layer.named_parameters())
    a, b = weights["lora_A.default.weight"], weights["lora_B.default.weight"]
    assert (a.shape, b.shape) == ((3, 48), (32, 3))
    expected = torch.stack([weights["base_layer.weight"] @ row + 5 / 3 * (b @ (a @ row)) for row in x])
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_only_the_adapter_is_trained() -> None:
    model = _adapted()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == set(_adapter(model))
    assert len(trained) == 2 * 7 * 2  # layers, matrices of a layer, A and B
    assert has_adapter(model)
    assert not has_adapter(_base())
    assert describe_adapter(model).startswith("rank 3, alpha 5 on down_proj, gate_proj, k_proj")


def test_a_new_adapter_changes_nothing_and_its_a_comes_from_the_seed() -> None:
    model, again, other = (_base() for _ in range(3))
    for each, seed in ((model, 1), (again, 1), (other, 2)):
        torch.manual_seed(torch.seed())
        add_adapter(each, base="base", rank=4, alpha=8, seed=seed)
    assert torch.equal(_logits(model), _logits(_base()))
    weights, same, different = _adapter(model), _adapter(again), _adapter(other)
    for name, weight in weights.items():
        assert torch.equal(weight, same[name])
        if ".lora_A." in name:
            # Uniform with the bound of torch's linear layers, 1 / sqrt(D_in).
            bound = weight.shape[1] ** -0.5
            assert not torch.equal(weight, different[name])
            assert 0.9 * bound < float(weight.abs().max()) <= bound
        else:
            assert not weight.any()


def test_numbers_of_the_adapter_are_chosen_apart_from_the_models() -> None:
    model = _base().to(torch.bfloat16)
    add_adapter(model, base="base", rank=4, alpha=8, dtype=torch.float32)
    assert {weight.dtype for weight in _adapter(model).values()} == {torch.float32}
    assert model.model.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.bfloat16


def test_every_linear_layer_of_the_decoder_is_the_default() -> None:
    assert set(default_targets(_base())) == EVERY
    phi = Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0))  # a family without a row
    assert default_targets(phi) == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]


def test_named_layers_alone_are_adapted() -> None:
    model = _adapted(targets=["v_proj"])
    assert {name.split(".")[-4] for name in _adapter(model)} == {"v_proj"}


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "linear_qkv", "input_layernorm"])
def test_what_is_no_linear_layer_of_the_decoder_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match=rf"lora.target_modules: \['{target}'\].*known: down_proj, gate_proj"):
        add_adapter(_base(), base="base", rank=2, alpha=2, targets=["q_proj", target])


def test_without_adapter_is_the_base_model_and_leaves_no_trace() -> None:
    model = _adapted()
    before = _logits(model)
    with pytest.raises(KeyError), without_adapter(model):
        assert torch.equal(_logits(model), _logits(_base()))
        assert all(parameter.requires_grad for name, parameter in model.named_parameters() if is_adapter_weight(name))
        raise KeyError
    assert torch.equal(_logits(model), before)
    assert not torch.allclose(before, _logits(_base()), atol=1e-2)


def _write(model: Any, directory: Path) -> Path:
    save_adapter(model, _adapter(model), directory)
    return directory


def test_a_written_adapter_is_the_one_that_peft_loads(tmp_path: Path) -> None:
    model = _adapted()
    directory = _write(model, tmp_path / "adapter")
    assert is_adapter_directory(str(directory))
    assert base_of_adapter(directory) == "base"
    theirs = PeftModel.from_pretrained(_base(), str(directory)).eval()
    torch.testing.assert_close(_logits(theirs), _logits(model), rtol=0, atol=1e-6)


def test_merging_is_that_of_peft(tmp_path: Path) -> None:
    model = _adapted()
    peft_model: Any = PeftModel.from_pretrained(_base(), str(_write(model, tmp_path / "adapter")))
    expected = dict(peft_model.merge_and_unload().state_dict())
    merged = dict(merged_weights(model, model.state_dict().items()))
    assert merged.keys() == expected.keys() == _base().state_dict().keys()
    for name, weight in expected.items():
        torch.testing.assert_close(merged[name], weight, rtol=1e-6, atol=1e-6)
    plain = _base()
    plain.load_state_dict(merged)
    torch.testing.assert_close(_logits(plain), _logits(model), rtol=0, atol=1e-5)
    with without_adapter(model):  # merging has not touched the frozen weights
        assert torch.equal(_logits(model), _logits(_base()))


def test_merging_rounds_once() -> None:
    """The sum is taken in fp32; peft rounds B A to 16 bits before it adds."""
    model = _adapted(rank=4, alpha=8)
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    name = "model.layers.0.mlp.up_proj"
    w, a, b = (narrow.get_parameter(f"{name}.{k}.weight") for k in ("base_layer", "lora_A.default", "lora_B.default"))
    expected = (w.float() + 2 * (b.float() @ a.float())).bfloat16()
    assert torch.equal(dict(merged_weights(narrow, narrow.state_dict().items()))[f"{name}.weight"], expected)


def test_weights_of_a_model_without_adapter_pass_unchanged() -> None:
    model = _base()
    for (name, weight), (expected, tensor) in zip(
        merged_weights(model, model.state_dict().items()), model.state_dict().items(), strict=True
    ):
        assert name == expected
        assert weight.data_ptr() == tensor.data_ptr()


def test_training_goes_on_from_a_stored_adapter(tmp_path: Path) -> None:
    model = _adapted(targets=["q_proj", "down_proj"])
    directory = str(_write(model, tmp_path / "adapter"))
    again = _base()
    add_adapter(again, base="base", path=directory)
    assert torch.equal(_logits(again), _logits(model))
    assert {n for n, p in again.named_parameters() if p.requires_grad} == set(_adapter(model))
    add_adapter(_base(), base="base", path=directory, rank=3, alpha=5, targets=["down_proj", "q_proj"])  # the same


def test_an_adapter_of_peft_with_another_scale_is_read_and_merged(tmp_path: Path) -> None:
    """rsLoRA multiplies by alpha / sqrt(rank)."""
    torch.manual_seed(5)
    config = LoraConfig(r=4, lora_alpha=3, target_modules=["v_proj"], use_rslora=True, init_lora_weights=False)
    theirs = get_peft_model(_base(), config)
    theirs.save_pretrained(str(tmp_path / "adapter"))
    model = _base()
    add_adapter(model, base="base", path=str(tmp_path / "adapter"))
    torch.testing.assert_close(_logits(model), _logits(theirs.eval()), rtol=0, atol=1e-6)
    plain = _base()
    plain.load_state_dict(dict(merged_weights(model, model.state_dict().items())))
    torch.testing.assert_close(_logits(plain), _logits(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 8}, "lora.rank=8, but the adapter .* has 3"),
        ({"alpha": 8}, "lora.alpha=8, but the adapter .* has 5"),
        ({"targets": ["q_proj"]}, "lora.target_modules=.*but the adapter"),
    ],
)
def test_settings_that_a_stored_adapter_contradicts_are_refused(tmp_path: Path, given: Any, message: str) -> None:
    directory = _write(_adapted(), tmp_path / "adapter")
    with pytest.raises(ValueError, match=message):
        add_adapter(_base(), base="base", path=str(directory), **given)


@pytest.mark.parametrize("kind", [{"use_dora": True}, {"bias": "all"}, {"rank_pattern": {"q_proj": 2}}])
def test_other_kinds_of_adapters_are_refused(tmp_path: Path, kind: dict[str, Any]) -> None:
    theirs = get_peft_model(_base(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **kind))
    theirs.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=f"is not plain LoRA: {next(iter(kind))}"):
        add_adapter(_base(), base="base", path=str(tmp_path / "adapter"))


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    directory = str(_write(_adapted(), tmp_path / "adapter"))
    wide = Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "intermediate_size": 64}))
    with pytest.raises(ValueError, match="does not fit the model: missing .*other shapes .*mlp"):
        add_adapter(wide, base="base", path=directory)
    deep = Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match="does not fit the model: missing .*layers.2"):
        add_adapter(deep, base="base", path=directory)
    phi = Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0))
    with pytest.raises(ValueError, match="does not fit|Target modules"):
        add_adapter(phi, base="base", path=directory)


def test_a_path_without_adapter_is_refused(tmp_path: Path) -> None:
    for path in (str(tmp_path), str(tmp_path / "absent")):
        with pytest.raises(ValueError, match="has no adapter_config.json"):
            add_adapter(_base(), base="base", path=path)


def test_an_adapter_of_the_output_head_is_refused(tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["lm_head", "q_proj"])
    theirs = get_peft_model(Qwen2ForCausalLM(Qwen2Config(**SIZES)), config)
    theirs.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match=r"adapts \['lm_head'\]"):
        add_adapter(Qwen2ForCausalLM(Qwen2Config(**SIZES)), base="base", path=str(tmp_path / "adapter"))


def test_what_of_a_stored_adapter_changes_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = _adapted()
    before.peft_config["default"].lora_dropout = 0.5
    directory = str(_write(before, tmp_path / "adapter"))
    model = _base().train()
    add_adapter(model, base="moved", path=directory)
    assert "trained with dropout 0.5; it goes on without" in caplog.text
    assert "was made for base, and is now used on moved" in caplog.text
    assert torch.equal(_logits(model), _logits(model))


def test_a_described_adapter_is_restored_for_weights_to_be_read_into(tmp_path: Path) -> None:
    model = _adapted(targets=["o_proj"])
    save_adapter_config(model, tmp_path)
    with torch.device("meta"):
        empty = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    restore_adapter(empty, tmp_path)
    found = _adapter(empty)
    assert {name: weight.shape for name, weight in found.items()} == {n: w.shape for n, w in _adapter(model).items()}
    assert {weight.device.type for weight in found.values()} == {"cpu"}
    save_adapter_config(_base(), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_without_peft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"pip install 'covey\[lora\]'"):
        add_adapter(_base(), base="base", rank=2, alpha=2)
