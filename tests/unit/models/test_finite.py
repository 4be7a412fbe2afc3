"""The first module with NaN is named, whatever comes after it turns into NaN too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from covey.models.finite import NonFiniteError, watch_gradients, watch_outputs


def model() -> Any:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32,
        )
    )  # fmt: skip


IDS = torch.tensor([[1, 2, 3, 4]])


def test_a_sound_model_gives_the_same_bits_watched_or_not():
    plain, watched = model(), model()
    watch_outputs(watched)
    assert torch.equal(plain(IDS).logits, watched(IDS).logits)


def test_a_weight_that_is_nan_is_named_and_not_what_follows_it():
    broken = model()
    watch_outputs(broken)
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight[3, 5] = float("nan")
    with pytest.raises(NonFiniteError) as caught:
        broken(IDS)
    assert str(caught.value) == (
        "debug: model.layers.1.mlp.down_proj (Linear) is the first module with an output that is not finite: 4 of 32 "
        "numbers, first at [0, 0, 3] of shape [1, 4, 8]; its inputs are finite, its weight not finite"
    )


def test_an_overflow_of_finite_weights_is_told_apart():
    broken = model()
    watch_outputs(broken)
    with torch.no_grad():
        broken.model.layers[2].mlp.gate_proj.weight.fill_(1e38)
        broken.model.layers[2].mlp.up_proj.weight.fill_(1e38)
    with pytest.raises(NonFiniteError, match=r"model\.layers\.2\.mlp\.\w+ .*inputs are \w.*its own weights are finite"):
        broken(IDS)


def test_only_a_named_module_is_checked_alone():
    layers: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    watch_outputs(layers, "the whole")
    with torch.no_grad():
        layers[0].weight.fill_(float("inf"))
    with pytest.raises(NonFiniteError, match=r"^debug: the whole \(Sequential\)"):
        layers(torch.ones(1, 2))


def test_gradients_that_are_not_finite_are_named_before_the_norm_is_taken():
    def norm(grads):
        return torch.nn.utils.get_total_norm([g for g in grads if g is not None])

    checked = watch_gradients(["first", "second", "third"], norm)
    good = [torch.tensor([3.0]), None, torch.tensor([4.0])]
    assert float(checked(good)) == 5.0
    with pytest.raises(NonFiniteError, match=r"the gradients of first, third \(2 of 3 parameters\)"):
        checked([torch.tensor([float("inf")]), None, torch.tensor([float("nan"), 1.0])])
