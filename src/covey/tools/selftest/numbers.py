"""Does the device compute what the CPU computes? Operations and attention against fp64 and fp32 on the CPU.

Every case runs forward and, where it has a gradient, backward, from the same rounded numbers on both sides. What is
compared is the difference relative to the size of the result, for each output and each gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from covey.algorithm.logprobs import logprobs_and_entropy
from covey.device import Device
from covey.findings import Finding
from covey.models.attention import varlen_attention
from covey.models.fused import TOLERANCES, rms_norm, rotary, swiglu
from covey.rollout.engine import Sampling
from covey.rollout.sampling import draw

_WHY = "training on this device would differ from training elsewhere"
_FIX = "send the bundle to the maintainers; until then model.kernels: reference, or another driver and torch version"


@dataclass(frozen=True)
class Case:
    """An operation and the shapes of its inputs, which are normal random numbers."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    fp32_only: bool = False  # used in fp32 alone: sums, log-probabilities, statistics


def _indices(x: Tensor, most: int) -> Tensor:
    """Row numbers that repeat, on the device of x."""
    return (torch.arange(37) * 7 % most).to(x.device)


def _head(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    targets = _indices(hidden, len(weight))[: len(hidden)]
    if hidden.dtype == torch.float64:  # the plain formula
        z = hidden @ weight.t()
        logp = z.log_softmax(-1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    return logprobs_and_entropy(hidden, weight, targets, rows_per_chunk=8)


OPERATIONS: dict[str, Case] = {
    "matmul": Case(torch.matmul, ((96, 256), (256, 160))),
    "bmm": Case(torch.bmm, ((4, 33, 64), (4, 64, 65))),
    "linear with bias": Case(F.linear, ((50, 128), (96, 128), (96,))),
    "embedding": Case(lambda x: F.embedding(_indices(x, len(x)), x), ((50, 64),)),
    "index_select": Case(lambda x: x.index_select(0, _indices(x, len(x))), ((50, 64),)),
    "index_add": Case(lambda x, y: x.index_add(0, _indices(x, len(x)), y), ((50, 64), (37, 64)), fp32_only=True),
    "gather": Case(lambda x: x.gather(1, _indices(x, 64)[None].expand(len(x), -1)), ((50, 64),)),
    "where": Case(lambda x, y: torch.where(_indices(x, 2).bool()[:, None], x, y), ((37, 64), (37, 64))),
    "cat of slices": Case(lambda x, y: torch.cat([x[3:9], y, x[20:]]), ((50, 64), (7, 64))),
    "silu": Case(F.silu, ((50, 64),)),
    "softmax": Case(lambda x: x.softmax(-1), ((50, 300),), fp32_only=True),
    "logsumexp": Case(lambda x: x.logsumexp(-1), ((50, 300),), fp32_only=True),
    "cumsum": Case(lambda x: x.cumsum(-1), ((20, 300),), fp32_only=True),
    "sum of a million": Case(lambda x: (x * x).sum(), ((1000, 1000),), fp32_only=True),
    "vector norm": Case(torch.linalg.vector_norm, ((1000, 100),), fp32_only=True),
    "rms_norm": Case(lambda x, w: rms_norm(x, w, 1e-6), ((37, 128), (128,))),
    "swiglu": Case(swiglu, ((37, 128), (37, 128))),
    "rotary": Case(lambda q, k: rotary(q, k, *_angles(q)), ((1, 4, 37, 64), (1, 2, 37, 64))),
    "log-probabilities and entropy": Case(_head, ((37, 64), (300, 64)), fp32_only=True),
}


@dataclass(frozen=True)
class AttentionShape:
    """Lengths of queries and keys, heads, key heads, head size."""

    lens_q: tuple[int, ...]
    lens_k: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int


SHAPES: dict[str, AttentionShape] = {
    "equal lengths": AttentionShape((64, 17, 128), (64, 17, 128), 4, 4, 64),
    "fewer queries than keys": AttentionShape((9, 40, 3), (80, 41, 300), 4, 2, 128),
    "one query": AttentionShape((1, 1, 1), (1, 33, 257), 4, 4, 64),
    "more than 2,048 keys": AttentionShape((70, 5), (2200, 2049), 2, 1, 64),
    "seven queries share a key head": AttentionShape((33, 20), (33, 50), 14, 2, 64),
    "1,030 sequences": AttentionShape((2,) * 1030, (3,) * 1030, 2, 1, 64),
}


def check_operations(device: Device) -> Iterator[Finding]:
    """One finding a dtype: the worst of OPERATIONS."""
    for dtype in _dtypes(device):
        names = [name for name, case in OPERATIONS.items() if dtype == torch.float32 or not case.fp32_only]
        errors = {name: _difference(OPERATIONS[name], device.torch_device, dtype) for name in names}
        yield _finding("operations", dtype, errors, TOLERANCES[dtype])


def check_attention_shapes(device: Device) -> Iterator[Finding]:
    """One finding a dtype: the worst of SHAPES, outputs and gradients, against matrix products in fp32 on the CPU."""
    for dtype in _dtypes(device):
        errors = {name: _attention_difference(shape, device.torch_device, dtype) for name, shape in SHAPES.items()}
        yield _finding("attention", dtype, errors, TOLERANCES[dtype])


def check_sampling(device: Device) -> Finding:
    """Equal logits and equal uniform numbers must give equal tokens, with and without filters."""
    logits = torch.randn(64, 5000, generator=torch.Generator().manual_seed(1)) * 3
    uniform = torch.rand(64, generator=torch.Generator().manual_seed(2))
    different: dict[str, int] = {}
    settings = {"all tokens": {}, "top_k 50": {"top_k": 50}, "top_p 0.9": {"top_p": 0.9}, "min_p 0.05": {"min_p": 0.05}}
    for name, filters in settings.items():
        sampling = Sampling(num_samples=1, max_response_length=1, temperature=0.8, **{**_NO_FILTER, **filters})
        here = draw(logits, uniform, sampling).token_ids
        there = draw(logits.to(device.torch_device), uniform.to(device.torch_device), sampling).token_ids.cpu()
        different[name] = int((here != there).sum())
    worst = max(different.values())
    return Finding(
        rule="sampling",
        severity="ok" if worst == 0 else "warning" if worst <= 1 else "failure",
        found=f"{worst} of 64 tokens differ from the CPU's at most",
        expected="none, or one where a sum rounds otherwise at the border of two tokens",
        why="rollouts would not be comparable between devices, even from equal logits",
        fix="" if worst <= 1 else _FIX,
        evidence=dict(different),
    )


_NO_FILTER = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "step": 0}


def check_determinism(device: Device) -> Finding:
    """Whether the same work twice gives the same bits: reported, and a failure only where the device promises it."""
    shape = SHAPES["fewer queries than keys"]
    dtype = device.dtype

    def bits() -> list[Tensor]:
        results = [
            y for case in OPERATIONS.values() if not case.fp32_only for y in _run(case, device.torch_device, dtype)
        ]
        return results + _attention(shape, device.torch_device, dtype, reference=False)

    first, second = bits(), bits()
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return Finding(
        rule="determinism",
        severity="ok" if same else "failure" if device.deterministic else "warning",
        found="the same bits twice" if same else "other bits the second time",
        expected="the same bits" if device.deterministic else "the same bits, with deterministic: true",
        why="a run could not be repeated or resumed bit for bit",
        fix="" if same else "set deterministic: true; without it compare runs with tolerances",
    )


def _finding(rule: str, dtype: torch.dtype, errors: dict[str, float], limit: float) -> Finding:
    name = str(dtype).removeprefix("torch.")
    bad = {case: error for case, error in errors.items() if not error <= limit}  # a NaN is too much as well
    worst = max(errors, key=lambda case: errors[case] if errors[case] == errors[case] else float("inf"))
    return Finding(
        rule=f"{rule} in {name}",
        severity="failure" if bad else "ok",
        found=", ".join(f"{case} {error:.1e}" for case, error in bad.items())
        or f"{len(errors)} cases, at most {errors[worst]:.1e} ({worst})",
        expected=f"relative differences up to {limit:.0e}",
        why=_WHY,
        fix=_FIX if bad else "",
        evidence={"limit": limit, "errors": errors},
    )


def _dtypes(device: Device) -> list[torch.dtype]:
    return list(dict.fromkeys([torch.float32, torch.bfloat16, device.dtype]))


def _angles(x: Tensor) -> tuple[Tensor, Tensor]:
    length, dim = x.shape[-2:]
    angles = torch.outer(torch.arange(float(length)), 10.0 ** -torch.linspace(0, 4, dim // 2)).repeat(1, 2)[None]
    return angles.cos().to(x.device, x.dtype), angles.sin().to(x.device, x.dtype)


def _random(shapes: Iterable[Sequence[int]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tuple(shape), generator=generator) for shape in shapes]


def _difference(case: Case, device: torch.device, dtype: torch.dtype) -> float:
    return _largest(_run(case, device, dtype), _run(case, torch.device("cpu"), torch.float64, rounded_to=dtype))


def _run(case: Case, device: torch.device, dtype: torch.dtype, rounded_to: torch.dtype | None = None) -> list[Tensor]:
    inputs = [x.to(rounded_to or dtype).to(dtype).to(device).requires_grad_() for x in _random(case.shapes)]
    return _with_gradients(case.function(*inputs), inputs)


def _attention_difference(shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> float:
    expected = _attention(shape, torch.device("cpu"), torch.float32, reference=True, rounded_to=dtype)
    return _largest(_attention(shape, device, dtype, reference=False), expected)


def _attention(
    shape: AttentionShape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    reference: bool,
    rounded_to: torch.dtype | None = None,
) -> list[Tensor]:
    rows_q, rows_k = sum(shape.lens_q), sum(shape.lens_k)
    shapes = [(rows_q, shape.heads, shape.dim), *[(rows_k, shape.kv_heads, shape.dim)] * 2]
    inputs = [x.to(rounded_to or dtype).to(dtype).to(device).requires_grad_() for x in _random(shapes)]
    out = varlen_attention(
        *inputs, lens_q=shape.lens_q, lens_k=shape.lens_k, scale=shape.dim**-0.5, reference=reference
    )
    return _with_gradients(out, inputs)


def _with_gradients(out: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Outputs and the gradients of all inputs for fixed random directions, on the CPU."""
    outputs = list(out) if isinstance(out, tuple) else [out]
    directions = _random(y.shape for y in outputs)
    torch.autograd.backward(outputs, [d.to(y.dtype).to(y.device) for d, y in zip(directions, outputs, strict=True)])
    gradients = [x.grad for x in inputs]
    assert all(gradient is not None for gradient in gradients)
    return [y.detach().cpu() for y in [*outputs, *gradients] if y is not None]


def _largest(found: list[Tensor], expected: list[Tensor]) -> float:
    ratios = [
        float((f.double() - e.double()).norm() / e.double().norm().clamp_min(1e-30))
        for f, e in zip(found, expected, strict=True)
    ]
    return float("nan") if any(ratio != ratio for ratio in ratios) else max(ratios)
