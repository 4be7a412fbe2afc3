"""Operations and attention agree with independent results; a wrong kernel, scale or gradient is named."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from covey import device as devices
from covey.tools.selftest import numbers

CPU = devices.resolve("cpu")


def test_operations_and_sampling_agree_with_fp64() -> None:
    findings = [*numbers.check_operations(CPU), numbers.check_sampling(CPU), numbers.check_determinism(CPU)]
    assert [f.severity for f in findings] == ["ok"] * 4


def test_a_kernel_that_is_one_percent_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(x: torch.Tensor) -> torch.Tensor:
        return x.softmax(-1) * (1.0 if x.dtype == torch.float64 else 1.01)

    monkeypatch.setitem(numbers.OPERATIONS, "softmax", numbers.Case(off, ((5, 30),), fp32_only=True))
    finding = next(iter(numbers.check_operations(CPU)))
    assert finding.severity == "failure"
    assert finding.found.startswith("softmax 1.0e-02")


def test_a_gradient_that_is_missing_its_sign_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] if grads[0].dtype == torch.float64 else -grads[0]

    monkeypatch.setattr(numbers, "OPERATIONS", {"copy": numbers.Case(Flipped.apply, ((4, 4),))})  # type: ignore[arg-type]
    assert [f.found[:4] for f in numbers.check_operations(CPU)] == ["copy", "copy"]


def test_a_wrong_attention_scale_and_a_nan_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real = numbers.varlen_attention

    def scaled(*tensors: torch.Tensor, scale: float, reference: bool, factor: float, **lengths: Any) -> torch.Tensor:
        return real(*tensors, scale=scale if reference else scale * factor, reference=reference, **lengths)

    monkeypatch.setattr(numbers, "SHAPES", {"equal lengths": numbers.SHAPES["equal lengths"]})
    for factor in (1.1, float("nan")):
        monkeypatch.setattr(numbers, "varlen_attention", partial(scaled, factor=factor))
        finding = next(iter(numbers.check_attention_shapes(CPU)))
        assert finding.severity == "failure"
        assert finding.found.startswith("equal lengths")


def test_the_attention_shapes_agree_with_matrix_products() -> None:
    assert [f.severity for f in numbers.check_attention_shapes(CPU)] == ["ok", "ok"]
