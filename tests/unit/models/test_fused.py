"""The self-test catches a kernel that computes something else; kernels go only into the modules they are known for."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2 import modeling_qwen2

from covey.models import fused, kernels
from covey.models.attention import attends_by_reference
from covey.models.kernels import FusedOp

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class _Calls:
    """Twins in the place of a device's kernels, which count how often they ran."""

    def __init__(self) -> None:
        self.counts = {"rms_norm": 0, "rotary": 0, "swiglu": 0}

    def ops(self, device: torch.device) -> dict[str, FusedOp]:
        found = {}
        for name in self.counts:
            twin: Callable[..., Any] = getattr(fused, name)
            found[name] = FusedOp(f"counted {name}", self._counted(name, twin), max_head_dim=896)
        return found

    def _counted(self, name: str, twin: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.counts[name] += 1
            return twin(*args)

        return run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> _Calls:
    found = _Calls()
    monkeypatch.setattr(fused, "fused_ops", found.ops)
    return found


def _model(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = SIZES | changes
    if family == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes))
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16))


def _choose(model: Any, **options: Any) -> dict[str, str]:
    return fused.choose_kernels(model, device=CPU, dtype=torch.float32, **options)


@pytest.mark.parametrize(("family", "norms"), [("qwen2", 5), ("qwen3", 9), ("llama", 5)])
def test_a_family_s_modules_run_the_kernels_and_compute_the_same(family: str, norms: int, calls: _Calls) -> None:
    model = _model(family)
    ids = torch.arange(12)[None]
    expected = model(ids, use_cache=False).logits
    assert _choose(model)["rms_norm"] == "counted rms_norm"
    calls.counts = dict.fromkeys(calls.counts, 0)
    found = model(ids, use_cache=False).logits
    assert calls.counts == {"rms_norm": norms, "rotary": 2, "swiglu": 2}
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_another_model_of_the_process_and_the_weights_names_stay_as_they_are(calls: _Calls) -> None:
    model, other = _model("qwen2"), _model("qwen2")
    names = list(model.state_dict())
    original = modeling_qwen2.apply_rotary_pos_emb
    _choose(model)
    assert list(model.state_dict()) == names
    assert modeling_qwen2.apply_rotary_pos_emb is original
    calls.counts = dict.fromkeys(calls.counts, 0)
    other(torch.arange(5)[None], use_cache=False)
    assert not any(calls.counts.values())


def test_a_copied_model_computes_with_its_own_weights(calls: _Calls) -> None:
    model = _model("qwen2")
    _choose(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    plain = _model("qwen2")
    plain.load_state_dict(twin.state_dict())
    ids = torch.arange(6)[None]
    torch.testing.assert_close(twin(ids, use_cache=False).logits, plain(ids, use_cache=False).logits)


def test_a_norm_of_another_class_is_left_alone_whatever_its_name_ends_in(calls: _Calls) -> None:
    class OnePlusRMSNorm(modeling_qwen2.Qwen2RMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) + hidden_states

    model = _model("qwen2")
    model.model.layers[1].input_layernorm = OnePlusRMSNorm(32)
    chosen = _choose(model)
    assert "OnePlusRMSNorm is not Qwen2RMSNorm" in chosen["rms_norm"]
    assert "forward" not in vars(model.model.layers[0].input_layernorm)
    assert chosen["swiglu"] == "counted swiglu"


def test_scaled_rotary_and_other_activations_keep_torch(calls: _Calls) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    chosen = _choose(_model("llama", rope_parameters=yarn, hidden_act="gelu", max_position_embeddings=256))
    assert "scaled by 1.1" in chosen["rotary"]
    assert "gelu" in chosen["swiglu"]


def test_reference_uses_torch_everywhere(calls: _Calls) -> None:
    model = _model("qwen3")
    chosen = _choose(model, reference=True)
    assert (chosen["rms_norm"], chosen["rotary"], chosen["swiglu"]) == ("torch", "torch", "torch")
    assert "matrix products" in chosen["attention"]
    assert attends_by_reference(model)


def _wrong_eps(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return fused.rms_norm(x, weight, 1e-5)


def _interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    def turn(x: Tensor) -> Tensor:
        swapped = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * cos.unsqueeze(1) + swapped * sin.unsqueeze(1)

    return turn(q), turn(k)


def _halves_swapped(gate: Tensor, up: Tensor) -> Tensor:
    return fused.swiglu(up, gate)


def _not_a_number(gate: Tensor, up: Tensor) -> Tensor:
    return fused.swiglu(gate, up) * float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("rms_norm", _wrong_eps),
        ("rotary", _interleaved),
        ("swiglu", _halves_swapped),
        ("swiglu", _not_a_number),
    ],
)
def test_a_wrong_kernel_ends_the_start(name: str, wrong: Any, dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr(fused, "fused_ops", lambda device: {name: FusedOp("the wrong one", wrong)})
    model = _model("qwen3", rms_norm_eps=1e-6).to(dtype)
    with pytest.raises(ValueError, match="the wrong one on cpu differs from its reference"):
        fused.choose_kernels(model, device=CPU, dtype=dtype)


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_cpu_s_attention_passes_with_room(dtype: torch.dtype, digits: float) -> None:
    assert fused.check_attention(CPU, dtype, head_dim=64, groups=7) < digits


def _attention(change: Callable[..., Any]) -> Any:
    """The cpu's back end with a mistake in its forward, and a matching backward."""
    right = kernels._CPU
    return dataclasses.replace(
        right,
        prepare=lambda lens_q, lens_k, **options: (lens_q, lens_k, options, right.prepare(lens_q, lens_k, **options)),
        forward=lambda q, k, v, p, scale: change(right, q, k, v, p, scale),
        backward=lambda grad, q, k, v, out, lse, p, scale: right.backward(grad, q, k, v, out, lse, p[3], scale),
    )


def _no_scale(right: Any, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float) -> Any:
    return right.forward(q, k, v, prepared[3], 1.0)


def _top_left(right: Any, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float) -> Any:
    lens_q, lens_k, options, call = prepared
    if not options["causal"]:
        return right.forward(q, k, v, call, scale)
    starts = [sum(lens_k[:i]) for i in range(len(lens_k))]
    rows = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lens_q, strict=True)])  # the first keys only
    return right.forward(q, k[rows], v[rows], right.prepare(lens_q, lens_q, **options), scale)


def _none(right: Any, q: Tensor, k: Tensor, v: Tensor, prepared: Any, scale: float) -> Any:
    return right.forward(q, k, v, prepared[3], scale)


def test_the_way_mistakes_are_planted_is_none_itself(monkeypatch: Any) -> None:
    monkeypatch.setattr(kernels, "_CPU", _attention(_none))
    _choose(_model("qwen2"))


@pytest.mark.parametrize("mistake", [_no_scale, _top_left])
def test_a_missing_scale_and_a_mask_at_the_top_left_end_the_start(mistake: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(kernels, "_CPU", _attention(mistake))
    with pytest.raises(ValueError, match="differs from its reference in the output"):
        _choose(_model("qwen2"))
