"""Every call of torch_npu that Covey makes, against the real package: its schemas and shape functions, no numbers.

Run by `make test-npu-schema`, in an environment of its own (stubs.py says how that works without CANN).
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch_npu") is None:
    pytest.skip("torch_npu is not installed here: make test-npu-schema", allow_module_level=True)

import torch
import torch_npu  # pyright: ignore[reportMissingImports]
from tests.npusim import torch_npu_twin
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from covey import device as devices
from covey.models import ascend, fused
from covey.models.attention import ATTENTION, PackedPlan
from covey.models.kernels import backend_for
from covey.types import Segment

META = torch.device("meta")
LENS_Q, LENS_K = [40, 1, 55], [40, 700, 3000]


class Recorder(TorchDispatchMode):
    """Keeps the calls of torch_npu's operations: (name, argument -> value, defaults included)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "npu":
            arguments = func._schema.arguments
            given = {a.name: value for a, value in zip(arguments, args, strict=False)} | (kwargs or {})
            self.calls.append((func._schema.name, {a.name: given.get(a.name, a.default_value) for a in arguments}))
        return func(*args, **(kwargs or {}))

    def of(self, name: str) -> list[dict[str, Any]]:
        return [given for called, given in self.calls if called == f"npu::{name}"]


def _inputs(lens_q: list[int], lens_k: list[int], dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    shapes = ((sum(lens_q), 14, 64), (sum(lens_k), 2, 64), (sum(lens_k), 2, 64))
    return tuple(torch.empty(shape, dtype=dtype, device=META) for shape in shapes)


def _running(lens: list[int]) -> list[int]:
    return [sum(lens[: i + 1]) for i in range(len(lens))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_causal_attention_of_unequal_lengths(dtype: torch.dtype) -> None:
    q, k, v = _inputs(LENS_Q, LENS_K, dtype)
    prepared = ascend.prepare(LENS_Q, LENS_K, causal=True, device=META)
    with Recorder() as recorder:
        out, lse = ascend.attention_forward(q, k, v, prepared, 0.125)
        grads = ascend.attention_backward(out, q, k, v, out, lse, prepared, 0.125)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == ((96, 14), torch.float32)
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, dtype) for x in (q, k, v)]
    (forward,), (backward,) = recorder.of("npu_fusion_attention"), recorder.of("npu_fusion_attention_grad")
    assert (forward["scale"], backward["scale_value"]) == (0.125, 0.125)
    for given in (forward, backward):
        assert given["input_layout"] == given["softmax_layout"] == "TND"
        assert given["sparse_mode"] == 3  # a causal mask at the bottom right
        assert (given["atten_mask"].shape, given["atten_mask"].dtype) == ((2048, 2048), torch.bool)
        assert (given["actual_seq_qlen"], given["actual_seq_kvlen"]) == (_running(LENS_Q), _running(LENS_K))
        assert (given["head_num"], given["keep_prob"]) == (14, 1.0)
    assert backward["softmax_max"].shape == backward["softmax_sum"].shape == (96, 14, 8)
    assert backward["softmax_max"].dtype == torch.float32


def test_the_mask_hides_what_lies_above_the_diagonal() -> None:
    hidden = ascend._hidden(torch.device("cpu"))
    assert not hidden[5, 5]
    assert hidden[5, 6]
    assert not hidden[6, 5]


def test_attention_without_a_mask_has_none() -> None:
    q, k, v = _inputs(LENS_Q, LENS_K)
    prepared = ascend.prepare(LENS_Q, LENS_K, causal=False, device=META)
    with Recorder() as recorder:
        out, lse = ascend.attention_forward(q, k, v, prepared, 0.125)
        ascend.attention_backward(out, q, k, v, out, lse, prepared, 0.125)
    assert [(given["atten_mask"], given["sparse_mode"]) for _, given in recorder.calls] == [(None, 0)] * 2


def test_at_most_1024_sequences_go_into_a_call() -> None:
    lens = [2] * 2500
    q, k, v = _inputs(lens, lens)
    prepared = ascend.prepare(lens, lens, causal=True, device=META)
    with Recorder() as recorder:
        out, lse = ascend.attention_forward(q, k, v, prepared, 0.125)
        ascend.attention_backward(out, q, k, v, out, lse, prepared, 0.125)
    assert (out.shape, lse.shape) == (q.shape, (5000, 14))
    sizes = [[len(g["actual_seq_qlen"]) for g in recorder.of(f"npu_fusion_attention{e}")] for e in ("", "_grad")]
    assert sizes == [[1024, 1024, 452]] * 2
    assert all(given["actual_seq_qlen"][0] == 2 for _, given in recorder.calls)  # totals start anew in every call


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: torch_npu.npu_fusion_attention(q, k, v, 14, "TND", cu_seqlens_q=[96]),
        lambda q, k, v: torch_npu.npu_rms_norm(q, q[0, 0], eps=1e-6),
        lambda q, k, v: torch_npu.npu_swiglu(q, axis=-1),
    ],
)
def test_a_wrong_keyword_is_refused(call: Any) -> None:
    with pytest.raises((TypeError, RuntimeError), match=r"(?i)keyword|argument|schema"):
        call(*_inputs([96], [96]))


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm_gets_the_configuration_s_epsilon(eps: float) -> None:
    x, weight = (torch.empty(shape, dtype=torch.bfloat16, device=META) for shape in ((1, 7, 64), (64,)))
    with Recorder() as recorder:
        out = ascend.rms_norm(x, weight, eps)
    assert (out.shape, out.dtype) == (x.shape, torch.bfloat16)
    assert recorder.of("npu_rms_norm")[0]["epsilon"] == eps


def test_rotary_gets_four_axes_rows_first_and_detached_cosines() -> None:
    q, k = (torch.empty(1, n, 9, 64, dtype=torch.bfloat16, device=META, requires_grad=True) for n in (14, 2))
    cos, sin = (torch.empty(1, 9, 64, dtype=torch.bfloat16, device=META) for _ in range(2))
    with Recorder() as recorder:
        turned = ascend.rotary(q, k, cos, sin)
    assert [x.shape for x in turned] == [q.shape, k.shape]
    for given, heads in zip(recorder.of("npu_rotary_mul"), (14, 2), strict=True):
        assert given["input"].shape == (1, 9, heads, 64)
        assert given["r1"].shape == given["r2"].shape == (1, 9, 1, 64)
        assert not given["r1"].requires_grad
        assert given["rotary_mode"] == "half"


def test_swiglu_gets_gate_and_up_side_by_side() -> None:
    gate, up = (torch.empty(1, 7, 48, dtype=torch.bfloat16, device=META) for _ in range(2))
    with Recorder() as recorder:
        out = ascend.swiglu(gate, up)
    assert out.shape == gate.shape
    (given,) = recorder.of("npu_swiglu")
    assert (given["input"].shape, given["dim"]) == ((1, 7, 96), -1)


def test_fused_adamw_exists_and_takes_the_optimizer_s_arguments() -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", "PrivateUse1")
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(8, 4, device="npu"))
        weight.grad = torch.empty(8, 4, device="npu")
        groups = [{"params": [weight], "weight_decay": 0.1}]
        torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True).step()


@pytest.mark.parametrize("name", [n for n in dir(torch_npu_twin.module()) if n.startswith("npu_")])
def test_the_simulated_device_s_twin_has_the_real_signature(name: str) -> None:
    schema = getattr(torch.ops.npu, name).default._schema
    expected = [(a.name, a.default_value if a.has_default_value() else None) for a in schema.arguments]
    twin = inspect.signature(getattr(torch_npu_twin, name)).parameters.values()
    found = [(p.name, None if p.default is inspect.Parameter.empty else p.default) for p in twin]
    assert found == expected


def test_what_the_device_table_asks_of_torch_npu_exists() -> None:
    for name in ("set_device", "get_device_name", "synchronize", "max_memory_allocated", "empty_cache", "mem_get_info"):
        assert callable(getattr(torch.npu, name)), name  # type: ignore[attr-defined]
    assert torch.distributed.is_backend_available("hccl")
    assert torch.distributed.get_default_backend_for_device("npu") == "hccl"
    resolved = devices.resolve("npu")
    assert (resolved.kind, resolved.dtype) == ("npu", torch.bfloat16)
    assert resolved.reduced_precision() == []
    assert "npu_fusion_attention" in backend_for(resolved.torch_device, torch.bfloat16).describe()


def test_a_training_pass_runs_on_fake_npu_tensors_through_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_check", lambda *arguments: 0.0)  # which needs numbers
    device = torch.device("npu:0")
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model: Any = Qwen3ForCausalLM(Qwen3Config(vocab_size=50, num_hidden_layers=2, head_dim=32, **sizes))
    with FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
        for module in model.modules():
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    on_npu = torch.empty(tensor.shape, dtype=torch.float32, device=device)
                    kept = nn.Parameter(on_npu) if name in module._parameters else on_npu
                    (module._parameters if name in module._parameters else module._buffers)[name] = kept
        chosen = fused.choose_kernels(model, device=device, dtype=torch.float32)
        model.set_attn_implementation(ATTENTION)
        plan = PackedPlan([Segment(0, 5, None), Segment(5, 9, 0), Segment(9, 12, 0)], device)
        ids, positions = (torch.zeros(1, 12, dtype=torch.int64, device=device) for _ in range(2))
        out = model.model(input_ids=ids, position_ids=positions, plan=plan, use_cache=False)
        out.last_hidden_state.sum().backward()
    del chosen["attention"]
    assert chosen == {"rms_norm": "npu_rms_norm", "rotary": "npu_rotary_mul", "swiglu": "npu_swiglu"}
    assert [len(recorder.of(f"npu_fusion_attention{e}")) for e in ("", "_grad")] == [4, 4]  # 2 layers x 2 passes
    assert [len(recorder.of(f"npu_{n}")) for n in ("rms_norm", "rotary_mul", "swiglu")] == [9, 4, 2]
    assert all(p.grad is not None for p in model.model.parameters())
