"""How fast the device is at Covey's own shapes: reported, never a failure.

Three rooflines are measured first, on this device: matrix products (FLOP/s), copies (bytes/s), launches (s). Each
kernel is then given as a share of the one that bounds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from covey.device import Device
from covey.findings import Finding
from covey.models.attention import varlen_attention
from covey.models.fused import rms_norm, swiglu
from covey.models.kernels import fused_ops

_REPEATS = 5


def check_speed(device: Device) -> Iterator[Finding]:
    """Rooflines, then the share of them that attention, norm and SwiGLU reach in the device's own dtype."""
    width = 1024 if device.kind == "cpu" else 4096
    peak = _matmul_flops(device, width)
    bandwidth = _copy_bytes(device, 2**22 if device.kind == "cpu" else 2**27)
    launch = _seconds(device, lambda x: x.add_(1.0), torch.zeros(1, device=device.torch_device))
    yield _report(
        "roofline",
        f"{peak / 1e12:.2f} TFLOP/s in {str(device.dtype).removeprefix('torch.')}, {bandwidth / 1e9:.1f} GB/s, "
        f"{launch * 1e6:.0f} us a launch",
        {"flops_per_s": peak, "bytes_per_s": bandwidth, "launch_s": launch},
    )
    flops = _attention_flops(device, 512 if device.kind == "cpu" else 2048)
    yield _report(
        "attention speed",
        f"{flops / 1e12:.2f} TFLOP/s, {flops / peak:.0%} of matrix products",
        {"flops_per_s": flops, "share": flops / peak},
    )
    for name, rate in _norm_and_swiglu(device, width).items():
        yield _report(
            f"{name} speed",
            f"{rate / 1e9:.1f} GB/s read and written, {rate / bandwidth:.0%} of copies",
            {"bytes_per_s": rate, "share": rate / bandwidth},
        )


def _report(rule: str, found: str, evidence: dict[str, float]) -> Finding:
    return Finding(rule, "ok", found, "as on other devices of this kind", "time", "", evidence)


def _seconds(device: Device, function: Callable[..., object], *inputs: Tensor) -> float:
    """The shortest of a few runs."""
    best = float("inf")
    for _ in range(_REPEATS + 1):  # the first one warms up
        device.synchronize()
        start = time.perf_counter()
        function(*inputs)
        device.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def _random(device: Device, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device.torch_device, device.dtype)


def _matmul_flops(device: Device, width: int) -> float:
    a, b = _random(device, width, width), _random(device, width, width)
    return 2 * width**3 / _seconds(device, torch.matmul, a, b)


def _copy_bytes(device: Device, size: int) -> float:
    source = torch.zeros(size, dtype=torch.float32, device=device.torch_device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(device, target.copy_, source)


def _attention_flops(device: Device, length: int) -> float:
    """Forward and backward of two causal sequences, 16 heads on 4: three and a half times the forward's products."""
    heads, kv_heads, dim = 16, 4, 64
    query, key, value = (_random(device, 2 * length, n, dim).requires_grad_() for n in (heads, kv_heads, kv_heads))
    lens = (length, length)

    def both(q: Tensor, k: Tensor, v: Tensor) -> None:
        varlen_attention(q, k, v, lens_q=lens, lens_k=lens, scale=dim**-0.5).sum().backward()

    forward = 2 * (2 * heads * length * length * dim * 2) / 2  # two products, half of them masked
    return 3.5 * forward / _seconds(device, both, query, key, value)


def _norm_and_swiglu(device: Device, width: int) -> dict[str, float]:
    """Bytes a second of the device's kernels, or of their twins where it has none."""
    ops = fused_ops(device.torch_device)
    x, y, weight = _random(device, 4096, width), _random(device, 4096, width), _random(device, width)
    norm = ops["rms_norm"].function if "rms_norm" in ops else rms_norm
    gate = ops["swiglu"].function if "swiglu" in ops else swiglu
    return {
        "rms_norm": 2 * x.nbytes / _seconds(device, lambda a: norm(a, weight, 1e-6), x),
        "swiglu": 3 * x.nbytes / _seconds(device, gate, x, y),
    }
