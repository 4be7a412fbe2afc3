"""Fused kernels in place of a model's small operations: root-mean-square norm, rotary embedding, SwiGLU.

A kernel is put in only where everything it relies on is known: the family has a row in `architectures.py`, and the
module is exactly the class named there (families compute differently under names that end alike). Before that, it and
the attention back end are run on the device, forward and backward, and compared with twins in fp32 on the cpu; a
difference ends the start of the run. Twins: `rms_norm`, `rotary`, `swiglu`, and `varlen_attention(reference=True)`.

Patches are bound methods of single modules: other models of the process, weights' names and exports stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from covey.models.architectures import ARCHITECTURES, Architecture, layers_of
from covey.models.attention import PackedPlan, attend_by_reference, varlen_attention
from covey.models.kernels import Backend, FusedOp, backend_for, fused_ops
from covey.types import Segment

# Largest |kernel - twin| / |twin| that the self-test accepts: a few roundings of the type.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def choose_kernels(model: Any, *, device: torch.device, dtype: torch.dtype, reference: bool = False) -> dict[str, str]:
    """Test the device's kernels, put them into `model` and say what runs each operation, for the start-up table.

    dtype: of the compute. reference: torch's own operations everywhere. ValueError when the attention back end cannot
    run the model, or a kernel computes something else than its twin.
    """
    backend = attention_backend(model, device=device, dtype=dtype, reference=reference)
    heads = _Heads.of(model)
    check_attention(device, dtype, head_dim=heads.size, groups=heads.num // heads.num_kv, reference=reference)
    attend_by_reference(model, reference)
    ops = {} if reference else fused_ops(device)
    return {"attention": backend.describe()} | {
        name: _use(name, ops.get(name), model, device, dtype) for name in ("rms_norm", "rotary", "swiglu")
    }


def attention_backend(model: Any, *, device: torch.device, dtype: torch.dtype, reference: bool = False) -> Backend:
    """The attention back end that `model` would run on; ValueError when it cannot. Needs no weights."""
    backend = backend_for(device, dtype, reference=reference)
    heads = _Heads.of(model)
    refusal = backend.refusal(dtype, head_dim=heads.size, num_heads=heads.num, num_kv_heads=heads.num_kv)
    if refusal is not None:
        raise ValueError(
            f"model.kernels: {backend.name} cannot run this model: {refusal}; set model.kernels: reference (slower)"
        )
    return backend


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis."""
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q (1, N, T, H), k (1, N_kv, T, H) turned by cos and sin (1, T, H): channel i with channel i + H / 2."""
    half = q.shape[-1] // 2
    turned = []
    for x in (q, k):
        first, second = x[..., :half], x[..., half:]
        turned.append(x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1))
    return turned[0], turned[1]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return gate * torch.sigmoid(gate) * up


def check_attention(
    device: torch.device, dtype: torch.dtype, *, head_dim: int, groups: int, reference: bool = False
) -> float:
    """The largest relative difference between the device's attention and dense attention; ValueError when too large.

    groups: query heads for each of two key heads. Tested: unequal lengths under the bottom-right mask, and a prompt
    with two responses by merged passes against the same with the prompt repeated.
    """
    name = backend_for(device, dtype, reference=reference).name
    scale = head_dim**-0.5

    def lengths(reference: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, lens_q=[3, 1, 5, 2], lens_k=[3, 6, 9, 2], scale=scale, reference=reference)

    def merged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plan = PackedPlan([Segment(0, 5, None), Segment(5, 9, 0), Segment(9, 12, 0)], device, reference=reference)
        return plan.attend(0, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), scale)

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat([x[:9], x[:5], x[9:]])[[*range(5), *range(9), *range(9, 17)]] for x in (k, v))
        return varlen_attention(q, k, v, lens_q=[5, 4, 3], lens_k=[5, 9, 8], scale=scale, reference=True)

    def inputs(num_q: int, num_k: int) -> list[Tensor]:
        return _random((num_q, 2 * groups, head_dim), (num_k, 2, head_dim), (num_k, 2, head_dim))

    unequal = _check(name, partial(lengths, reference), partial(lengths, True), inputs(11, 20), device, dtype)
    return max(unequal, _check(f"{name}, merged", merged, repeated, inputs(12, 12), device, dtype))


def check_rms_norm(op: FusedOp, device: torch.device, dtype: torch.dtype, *, eps: float, width: int = 64) -> float:
    """As check_attention, for rows of size 1 and rows so small that eps decides."""
    x, weight = _random((6, width), (width,))
    x[3:] *= eps**0.5
    weight += 1.0

    def kernel(x: Tensor, weight: Tensor) -> Tensor:
        return op.function(x, weight, eps)

    def twin(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, eps)

    return _check(op.name, kernel, twin, [x, weight], device, dtype)


def check_rotary(op: FusedOp, device: torch.device, dtype: torch.dtype, *, head_dim: int) -> float:
    """As check_attention, for the angles of eight positions."""
    angles = torch.outer(torch.arange(8.0), 10.0 ** -torch.linspace(0, 4, head_dim // 2)).repeat(1, 2)[None]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def kernel(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return op.function(q, k, cos.to(device), sin.to(device))

    def twin(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotary(q, k, cos.float(), sin.float())

    return _check(op.name, kernel, twin, _random((1, 4, 8, head_dim), (1, 2, 8, head_dim)), device, dtype)


def check_swiglu(op: FusedOp, device: torch.device, dtype: torch.dtype) -> float:
    """As check_attention."""
    return _check(op.name, op.function, swiglu, _random((1, 5, 64), (1, 5, 64)), device, dtype)


@dataclass(frozen=True)
class _Heads:
    """Attention heads of a model."""

    num: int
    num_kv: int
    size: int

    @classmethod
    def of(cls, model: Any) -> _Heads:
        """From its configuration."""
        config = model.config.get_text_config()
        num, num_kv = config.num_attention_heads, config.num_key_value_heads
        return cls(num, num_kv, getattr(config, "head_dim", None) or config.hidden_size // num)


def _random(*shapes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tuple(shape), generator=generator) for shape in shapes]


def _check(
    name: str,
    kernel: Callable[..., Any],
    twin: Callable[..., Any],
    inputs: list[Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> float:
    """Largest relative difference of outputs and of every input's gradient; ValueError over the tolerance."""
    on_device = [x.to(dtype).to(device).requires_grad_() for x in inputs]
    exact = [x.to(dtype).float().requires_grad_() for x in inputs]  # the same rounded numbers
    found, expected = (_as_tuple(f(*x)) for f, x in ((kernel, on_device), (twin, exact)))
    directions = _random(*(y.shape for y in expected))
    torch.autograd.backward(found, [d.to(dtype).to(device) for d in directions])
    torch.autograd.backward(expected, [d.to(dtype).float() for d in directions])
    pairs: list[tuple[str, Any, Any]] = [("output", f, e) for f, e in zip(found, expected, strict=True)]
    pairs += [(f"gradient of input {i}", x.grad, y.grad) for i, (x, y) in enumerate(zip(on_device, exact, strict=True))]
    largest = 0.0
    for what, mine, theirs in pairs:
        difference = (mine.detach().cpu().float() - theirs.detach()).norm() / theirs.detach().norm()
        if not difference <= TOLERANCES[dtype]:  # a NaN is too much as well
            raise ValueError(
                f"model.kernels: {name} on {device} differs from its reference in the {what} by {difference:.1e} of "
                f"its size, over {TOLERANCES[dtype]:.0e} for {str(dtype).removeprefix('torch.')}: it would train "
                "another model. Check the driver and library versions, or set model.kernels: reference"
            )
        largest = max(largest, float(difference))
    return largest


def _as_tuple(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def _use(name: str, op: FusedOp | None, model: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Put one operation's kernel in; what runs it from now on."""
    if op is None:
        return "torch"
    row = ARCHITECTURES.get(model.config.model_type)
    if row is None:
        return f"torch: {model.config.model_type} has no row in covey.models.architectures"
    modules = _modules(name, model, row)
    if strangers := {_path(type(module)) for module in modules} - {f"{row.modeling}.{row.class_of(name)}"}:
        return f"torch: {', '.join(sorted(strangers))} is not {row.class_of(name)}"
    if reason := _unsuitable(name, op, model):
        return f"torch: {reason}"
    if name == "rms_norm":
        for eps in {module.variance_epsilon for module in modules}:
            check_rms_norm(op, device, dtype, eps=eps)
    elif name == "rotary":
        check_rotary(op, device, dtype, head_dim=_Heads.of(model).size)
    else:
        check_swiglu(op, device, dtype)
    for module in modules:
        module.forward = MethodType(_forward(name, op, module), module)
    return op.name


def _modules(name: str, model: Any, row: Architecture) -> list[Any]:
    """The modules of a known family whose forward contains the operation."""
    layers = layers_of(model)
    if name == "rms_norm":
        inside = [layer.get_submodule(norm) for layer in layers for norm in (*row.norms, *row.head_norms)]
        return [*inside, model.base_model.get_submodule(row.final_norm)]
    return [layer.get_submodule(row.attention if name == "rotary" else row.mlp) for layer in layers]


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _unsuitable(name: str, op: FusedOp, model: Any) -> str | None:
    """What of the model the kernel does not compute."""
    config = model.config.get_text_config()
    if name == "swiglu" and config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if name == "rotary":
        factor = getattr(model.base_model.rotary_emb, "attention_scaling", 1.0)
        if factor != 1.0:
            return f"its rotary embedding is scaled by {factor:.3g}, and {op.name} takes cosines only"
        head_dim = _Heads.of(model).size
        if head_dim % 2 or (op.max_head_dim and head_dim >= op.max_head_dim):
            return f"its head size is {head_dim}"
    return None


def _forward(name: str, op: FusedOp, module: Any) -> Callable[..., Any]:
    """The module's forward with the kernel in it."""
    function = op.function
    if name == "rms_norm":

        def norm(self: Any, hidden_states: Tensor) -> Tensor:
            return function(hidden_states, self.weight, self.variance_epsilon)

        return norm
    if name == "swiglu":

        def mlp(self: Any, x: Tensor) -> Tensor:
            return self.down_proj(function(self.gate_proj(x), self.up_proj(x)))

        return mlp
    # The family's own code, with the one function it calls for the rotation exchanged, for this module only.
    original = inspect.unwrap(type(module).forward)
    names = original.__globals__ | {"apply_rotary_pos_emb": function}
    copy = FunctionType(original.__code__, names, original.__name__, original.__defaults__, original.__closure__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy
