"""The selftest passes on this device, and names what is wrong when a kernel, a mask or an exchange is."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from covey import device as devices
from covey.tools.selftest import numbers, run, speed
from covey.tools.selftest.score import distinct_characters

CPU = devices.resolve("cpu")


@pytest.mark.slow
def test_a_sound_device_passes_and_leaves_a_bundle(tmp_path: Path) -> None:
    seen: list[str] = []
    findings = run.run(tmp_path / "out", kind="cpu", on_finding=lambda finding: seen.append(finding.rule))
    assert {f.severity for f in findings} == {"ok", "skipped"}
    assert seen == [f.rule for f in findings]
    bundle = json.loads((tmp_path / "out" / "selftest.json").read_text())
    assert bundle["pass"] is True
    assert (
        bundle["packages"]["torch"] == torch.__version__.split("+")[0]
        or bundle["packages"]["torch"] == torch.__version__
    )
    assert [f["rule"] for f in bundle["findings"]] == seen
    trained = [json.loads(line) for line in (tmp_path / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(
        line["actor/grad_norm"] > 0 for line in trained if line["step"] > 0
    )  # steps that change nothing prove nothing


def test_other_content_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="is no earlier selftest"):
        run.run(tmp_path, kind="cpu")
    assert (tmp_path / "mine.txt").read_text() == "keep"


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


def test_one_process_has_nobody_to_exchange_with() -> None:
    (finding,) = run.check_exchanges(CPU)
    assert finding.severity == "skipped"
    assert "torchrun --nproc-per-node 2" in finding.fix


def test_the_speeds_are_shares_of_measured_rooflines() -> None:
    findings = {f.rule: f for f in speed.check_speed(CPU)}
    peak = findings["roofline"].evidence["flops_per_s"]
    flops = findings["attention speed"].evidence
    assert flops["share"] == pytest.approx(flops["flops_per_s"] / peak)
    assert peak > 1e8  # a hundred million a second: below that something was not measured


def test_the_reward_counts_distinct_characters() -> None:
    assert distinct_characters(["aab", "", "xyz"], [{}] * 3, {}) == [2 / 3, 0.0, 1.0]
