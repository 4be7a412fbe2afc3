"""What identifies a weight without keeping it: norm, hash, and numbers that tell how two unequal weights are related.

`probe` is s' W t and `probe_t` t' W s of the matrix with its sides exchanged, for two fixed vectors of cosines; so if
one weight is the other's transpose, each one's probe is the other's probe_t. `bits` is a sum over the bf16 bit
patterns, which no reordering changes. Weights of different number types are compared by their hash in bf16: a
checkpoint in bf16 that one side keeps in fp32 has the same one.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

_ROWS = 4096  # rows in fp64 at a time


def fingerprint(weight: Tensor) -> dict[str, Any]:
    """Shape, dtype, norm, sha256, sha256_bf16, bits, probe, probe_t of a whole weight."""
    own = weight.detach().cpu().contiguous()
    matrix = own.reshape(own.shape[0], -1) if own.dim() else own.reshape(1, 1)
    height, width = matrix.shape
    exact, rounded = hashlib.sha256(), hashlib.sha256()
    bits, square, probe, probe_t = 0, 0.0, 0.0, 0.0
    s, t = _cosines(max(height, width), 0.7390851, 0.0), _cosines(max(height, width), 1.2345678, 0.5)
    for start in range(0, height, _ROWS):
        part = matrix[start : start + _ROWS]
        half = part.to(torch.bfloat16)
        exact.update(part.view(torch.uint8).numpy().data)
        rounded.update(half.view(torch.uint8).numpy().data)
        bits += int(half.view(torch.int16).sum(dtype=torch.int64))
        double = part.double()
        square += float(double.square().sum())
        rows = slice(start, start + len(part))
        probe += float(s[rows] @ (double @ t[:width]))
        probe_t += float(t[rows] @ (double @ s[:width]))
    return {
        "shape": list(weight.shape),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "norm": math.sqrt(square),
        "sha256": exact.hexdigest()[:16],
        "sha256_bf16": rounded.hexdigest()[:16],
        "bits": bits,
        "probe": probe,
        "probe_t": probe_t,
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two weights are equal, as far as the coarser of their number types can tell."""
    key = "sha256" if a["dtype"] == b["dtype"] else "sha256_bf16"
    return a["shape"] == b["shape"] and a[key] == b[key]


def relation(a: dict[str, Any], b: dict[str, Any]) -> str:
    """How weight `b` differs from `a`, in words; "" when they are equal."""
    if same(a, b):
        return ""
    sizes = f"norm {a['norm']:.6g} in A, {b['norm']:.6g} in B"
    tolerance = 1e-2 * max(abs(a["probe"]), abs(a["probe_t"]), 1e-12)
    crossed = abs(b["probe"] - a["probe_t"]) < tolerance and abs(b["probe_t"] - a["probe"]) < tolerance
    if len(a["shape"]) == 2 and a["shape"] == b["shape"][::-1] and crossed:
        return f"transposed in B (same numbers; {sizes})"
    if a["shape"] != b["shape"]:
        return f"shape {a['shape']} in A, {b['shape']} in B"
    if not b["norm"] or not a["norm"]:
        return f"all zero in {'B' if a['norm'] else 'A'} ({sizes})"
    if a["bits"] == b["bits"]:
        return f"the same numbers in another order in B ({sizes})"
    close = abs(b["probe"] - a["probe"]) < tolerance and abs(b["norm"] / a["norm"] - 1) < 1e-2
    return f"{'slightly other' if close else 'other'} numbers in B ({sizes})"


def _cosines(n: int, frequency: float, phase: float) -> Tensor:
    return torch.cos(torch.arange(n, dtype=torch.float64) * frequency + phase)
