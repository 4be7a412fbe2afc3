"""How two weights are related, from their fingerprints alone; the relation is planted."""

from __future__ import annotations

import math

import torch

from covey.tools.align.fingerprint import fingerprint, relation, same


def _weight(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _said(a: torch.Tensor, b: torch.Tensor) -> str:
    return relation(fingerprint(a), fingerprint(b))


def test_relations_are_told_apart() -> None:
    square, flat = _weight(48, 48), _weight(32, 48)
    assert _said(square, square.clone()) == ""
    assert _said(square, square.t()).startswith("transposed in B")
    assert _said(flat, flat.t()).startswith("transposed in B")
    assert _said(square, square.flip(0)).startswith("the same numbers in another order")
    assert _said(square, torch.zeros(48, 48)).startswith("all zero in B")
    assert _said(square, _weight(48, 48) * 1.5).startswith("other numbers")
    assert _said(square, square * 1.0001).startswith("slightly other numbers")
    assert _said(square, flat).startswith("shape [48, 48] in A, [32, 48] in B")


def test_a_rounded_weight_is_the_same_and_a_changed_one_is_not() -> None:
    """A checkpoint in bf16 that one side keeps in fp32."""
    stored = _weight(16, 8).bfloat16()
    assert same(fingerprint(stored.float()), fingerprint(stored))
    changed = stored.float()
    changed[3, 2] *= 1.01
    assert not same(fingerprint(changed), fingerprint(stored))


def test_norm_and_probe_by_a_loop() -> None:
    weight = _weight(3, 2)
    found = fingerprint(weight)
    s, t = ([math.cos(i * f + p) for i in range(3)] for f, p in ((0.7390851, 0.0), (1.2345678, 0.5)))
    probe = sum(s[i] * float(weight[i, j]) * t[j] for i in range(3) for j in range(2))
    assert abs(found["probe"] - probe) < 1e-5
    assert abs(found["norm"] - sum(float(x) ** 2 for x in weight.flatten()) ** 0.5) < 1e-6
