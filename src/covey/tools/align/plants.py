"""Faults to plant: edits of a checkpoint's files, and ways in which a kernel computes something else.

Each of the second kind is a context that the running model is put into; its files and its facts stay those of A.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from covey.models.architectures import layers_of
from covey.models.attention import PackedPlan
from covey.setup import Parts


def edit_json(file: str, **values: Any) -> Callable[[Path], None]:
    """Other values in a JSON file of a checkpoint."""

    def edit(model: Path) -> None:
        path = model / file
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(found | values), encoding="utf-8")

    return edit


def edit_weights(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    """Other weights in a checkpoint; `change` works in place."""

    def edit(model: Path) -> None:
        weights = load_file(model / "model.safetensors")
        change(weights)
        contiguous = {name: weight.contiguous() for name, weight in weights.items()}
        save_file(contiguous, model / "model.safetensors", {"format": "pt"})

    return edit


def transpose(weights: dict[str, Tensor]) -> None:
    """A square matrix the other way round."""
    name = "model.layers.1.self_attn.q_proj.weight"
    weights[name] = weights[name].t()


def zero_bias(weights: dict[str, Tensor]) -> None:
    """A bias that a conversion forgot."""
    weights["model.layers.0.self_attn.k_proj.bias"].zero_()


def swap_norms(weights: dict[str, Tensor]) -> None:
    """Two vectors of one shape in each other's place."""
    a, b = (f"model.layers.1.{name}_layernorm.weight" for name in ("input", "post_attention"))
    weights[a], weights[b] = weights[b], weights[a]


def forwards(of: Callable[[Any], Iterator[Any]], forward: Callable[..., Tensor]) -> Callable[[Parts], Any]:
    """Modules of the model compute `forward(module, x)` inside."""

    @contextmanager
    def around(parts: Parts) -> Iterator[None]:
        modules = list(of(parts.policy.model))
        for module in modules:
            module.forward = forward.__get__(module)
        try:
            yield
        finally:
            for module in modules:
                del module.forward

    return around


def replaced(owner: Any, name: str, value: Any) -> Callable[[Parts], Any]:
    """An attribute has another value inside."""

    @contextmanager
    def around(parts: Parts) -> Iterator[None]:
        before = getattr(owner, name)
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, before)

    return around


def modeling() -> Any:
    """The module whose functions the tiny model calls."""
    from transformers.models.qwen2 import modeling_qwen2

    return modeling_qwen2


def norms(model: Any) -> Iterator[Any]:
    """Those of all layers."""
    for layer in layers_of(model):
        yield from (layer.input_layernorm, layer.post_attention_layernorm)


def linears(model: Any) -> Iterator[Any]:
    """Those of layer 1."""
    for module in layers_of(model)[1].modules():
        if isinstance(module, torch.nn.Linear):
            yield module


def other_eps(module: Any, x: Tensor) -> Tensor:
    """A norm with an eps of its own."""
    return functional.rms_norm(x, module.weight.shape, module.weight, 1e-5)


def half(module: Any, x: Tensor) -> Tensor:
    """A projection computed in bfloat16."""
    bias = None if module.bias is None else module.bias.bfloat16()
    return functional.linear(x.bfloat16(), module.weight.bfloat16(), bias).to(x.dtype)


def tf32(module: Any, x: Tensor) -> Tensor:
    """A projection whose inputs lose bits, as in TF32 or HF32."""
    return functional.linear(_short(x), _short(module.weight), module.bias)


def _short(x: Tensor) -> Tensor:
    """Rounded to 10 bits of mantissa; the gradient passes."""
    scale = torch.exp2(10 - x.detach().abs().clamp(min=1e-30).log2().floor())
    return x + ((x * scale).round() / scale - x).detach()


def turned(module: Any, x: Tensor) -> Tensor:
    """A projection that reads its weight the other way round."""
    return functional.linear(x, module.weight.t(), module.bias)


def without_bias(module: Any, x: Tensor) -> Tensor:
    """A projection that forgets its bias."""
    return functional.linear(x, module.weight)


def scale_one(plan: Any, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention with scale 1."""
    return _ATTEND(plan, layer, query, key, value, 1.0)


def one_row(plan: Any, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal over the whole packed row, as if it were one sequence."""
    times = len(query) // len(key)
    k, v = (x.repeat_interleave(times, 0) for x in (key, value))
    return functional.scaled_dot_product_attention(query, k, v, is_causal=True, scale=scale).transpose(0, 1)


_ATTEND = PackedPlan.attend


def rotate_neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotary embedding of pairs of neighbours, where the model means halves of the head."""
    half = cos.shape[-1] // 2
    c, s = (t[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for t in (cos, sin))

    def turn(x: Tensor) -> Tensor:
        return x * c + torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2) * s

    return turn(q), turn(k)


@contextmanager
def halved_gradient(parts: Parts) -> Iterator[None]:
    """A mean over two ranks where a sum is meant."""
    parallel = parts.policy.parallel
    accumulate = parallel.accumulate

    def half(*args: Any, **options: Any) -> None:
        accumulate(*args, **options)
        for parameter in parts.policy.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(2)

    parallel.accumulate = half
    try:
        yield
    finally:
        parallel.accumulate = accumulate
