"""Packed training equals Hugging Face run on one sequence at a time: log-probabilities, entropies and gradients.

The reference below is transformers' own attention on each prompt + response, with plain log-softmax, in fp32.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from covey.models import kernels
from covey.models.attention import PackedPlan
from covey.models.load import prepare_model
from covey.models.packing import pack, response_lengths
from covey.models.scoring import ScoringModel
from covey.types import Group, Prompt, Response

VOCAB, TEMPERATURE = 97, 0.7
CPU = torch.device("cpu")
SHAPES = [(5, [3, 1, 7, 20]), (9, [6, 6]), (1, [1]), (30, [40, 4]), (1, [2, 9])]  # prompt length, response lengths


def _model(family: str, *, kv_heads: int, tied: bool):
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
    }
    torch.manual_seed(0)
    if family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=32))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():  # initial biases and norms are 0 and 1, which would hide a dropped one
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embed" not in name:
                parameter.mul_(3.0)
    return model


def _groups() -> list[Group]:
    generator = torch.Generator().manual_seed(1)

    def ids(n: int) -> list[int]:
        return torch.randint(0, VOCAB, (n,), generator=generator).tolist()

    return [
        Group(Prompt(p, ids(num_prompt), ""), [Response(ids(n), [0.0] * n) for n in lengths])
        for p, (num_prompt, lengths) in enumerate(SHAPES)
    ]


def _coefficients(groups: list[Group]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    n = sum(response_lengths(groups))
    return torch.randn(n, generator=generator), torch.randn(n, generator=generator)


def _grads(model) -> list[torch.Tensor]:
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None for grad in grads)
    return [grad for grad in grads if grad is not None]


def _reference(model, groups: list[Group]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    model = copy.deepcopy(model)
    model.set_attn_implementation("sdpa")
    a, b = _coefficients(groups)
    logprobs, entropies = [], []
    for group in groups:
        for response in group.responses:
            ids = torch.tensor([group.prompt.input_ids + response.token_ids])
            first = len(group.prompt.input_ids)
            logits = model(ids, use_cache=False).logits[0, first - 1 : -1] / TEMPERATURE
            logp = logits.log_softmax(-1)
            logprobs.append(logp.gather(1, ids[0, first:, None])[:, 0])
            entropies.append(-(logp.exp() * logp).sum(-1))
    (torch.cat(logprobs) @ a + torch.cat(entropies) @ b).backward()
    return torch.cat(logprobs).detach(), torch.cat(entropies).detach(), _grads(model)


def _packed(model, groups, *, max_tokens=10_000, share=True, checkpointing=False, chunk=7, whole=True):
    model = copy.deepcopy(model)
    prepare_model(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    scoring = ScoringModel(model, temperature=TEMPERATURE, logits_chunk_bytes=chunk * 4 * VOCAB, whole=whole)
    a, b = _coefficients(groups)
    logprobs, entropies = torch.zeros_like(a), torch.zeros_like(a)
    for batch in pack(groups, max_tokens=max_tokens, device=CPU, share_prompts=share):
        plan = PackedPlan(batch.segments, CPU)
        lp, entropy = scoring(batch.input_ids, batch.position_ids, plan, batch.target_rows, batch.target_ids)
        logprobs[batch.token_index], entropies[batch.token_index] = lp.detach(), entropy.detach()
        (lp @ a[batch.token_index] + entropy @ b[batch.token_index]).backward()
    return logprobs, entropies, _grads(model)


def _relative(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    difference = sum((x - y).square().sum() for x, y in zip(actual, expected, strict=True))
    return float((difference / sum(y.square().sum() for y in expected)) ** 0.5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_packed_equals_one_sequence_at_a_time(family: str, kv_heads: int, tied: bool) -> None:
    model, groups = _model(family, kv_heads=kv_heads, tied=tied), _groups()
    expected, actual = _reference(model, groups), _packed(model, groups)
    torch.testing.assert_close(actual[0], expected[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(actual[1], expected[1], atol=2e-5, rtol=0)
    assert _relative(actual[2], expected[2]) < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 60},
        {"max_tokens": 1},
        {"share": False},
        {"share": False, "max_tokens": 50},
        {"checkpointing": True},
        {"chunk": 1},
        {"whole": False},
        {"whole": False, "max_tokens": 60},
        {"chunk": 1000, "checkpointing": True, "max_tokens": 45},
    ],
)
def test_cutting_the_batch_does_not_change_the_gradient(options: dict) -> None:
    model, groups = _model("qwen3", kv_heads=2, tied=True), _groups()
    expected, actual = _packed(model, groups), _packed(model, groups, **options)
    torch.testing.assert_close(actual[0], expected[0], atol=2e-5, rtol=0)
    assert _relative(actual[2], expected[2]) < 1e-5


def test_the_matmul_kernel_equals_the_flash_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model, groups = _model("qwen2", kv_heads=2, tied=True), _groups()
    expected = _packed(model, groups)
    monkeypatch.setattr(kernels, "_CPU", kernels._MATMUL)
    actual = _packed(model, groups)
    torch.testing.assert_close(actual[0], expected[0], atol=2e-5, rtol=0)
    assert _relative(actual[2], expected[2]) < 1e-5


def test_bfloat16_stays_near_float32() -> None:
    model, groups = _model("qwen2", kv_heads=2, tied=True), _groups()
    # Initial size: the enlarged weights of _model make logits that 8 bits of mantissa cannot carry.
    model.apply(model._init_weights)
    exact, _, _ = _packed(model, groups)
    rounded, _, grads = _packed(copy.deepcopy(model).bfloat16(), groups)
    assert (rounded - exact).abs().mean() <= 0.01
    assert all(torch.isfinite(g).all() for g in grads)


def test_a_sliding_window_is_refused() -> None:
    config = Qwen2Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=0,
    )
    with pytest.raises(ValueError, match="sliding window"):
        prepare_model(Qwen2ForCausalLM(config))
