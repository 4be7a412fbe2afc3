"""KL estimators against MindSpeed-RL's values and the exact KL of a small distribution."""

from __future__ import annotations

import math

import pytest
import torch

from covey.algorithm.kl import KL_ESTIMATORS, KlController

POLICY = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REF = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
EXACT = (POLICY * (POLICY / REF).log()).sum()


@pytest.mark.parametrize(("logprob", "ref", "expected"), [(0.5, 1.0, 0.1487212), (1.0, 0.5, 0.1065307)])
def test_low_var_kl_equals_mindspeed_rl(logprob: float, ref: float, expected: float) -> None:
    assert KL_ESTIMATORS["low_var_kl"](torch.tensor([logprob]), torch.tensor([ref])).item() == pytest.approx(
        expected, abs=1e-7
    )


def test_low_var_kl_is_held_at_ten() -> None:
    logprobs, ref = torch.tensor([-30.0, 0.0]), torch.tensor([0.0, -12.0])
    assert KL_ESTIMATORS["low_var_kl"](logprobs, ref).tolist() == [10.0, 10.0]
    assert KL_ESTIMATORS["k3"](logprobs, ref).tolist() == pytest.approx([math.exp(20) - 21, 11.0], rel=1e-5)


@pytest.mark.parametrize("name", ["k1", "k3", "low_var_kl"])
def test_unbiased_estimators_have_the_exact_kl_as_expectation(name: str) -> None:
    values = KL_ESTIMATORS[name](POLICY.log(), REF.log())
    assert (POLICY * values).sum().item() == pytest.approx(EXACT.item())


def test_k2_is_half_the_squared_log_ratio() -> None:
    assert KL_ESTIMATORS["k2"](torch.tensor([-1.0]), torch.tensor([-3.0])).item() == 2.0


def exact_gradient() -> torch.Tensor:
    logits = POLICY.log().requires_grad_()
    policy = logits.softmax(-1)
    (policy * (policy / REF).log()).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_in_expectation_is_what_the_docstring_says(name: str, weighted: bool) -> None:
    logits = POLICY.log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    kl = KL_ESTIMATORS[name](logprobs, REF.log())
    if weighted:
        kl = kl * (logprobs - logprobs.detach()).exp()
    (POLICY * kl).sum().backward()
    assert logits.grad is not None
    unbiased = {("k2", False), ("k3", True), ("k1", True)}
    if (name, weighted) in unbiased:
        assert torch.allclose(logits.grad, exact_gradient())
    elif name == "k1":
        assert torch.allclose(logits.grad, torch.zeros_like(REF))
    else:
        assert not torch.allclose(logits.grad, exact_gradient(), atol=1e-2)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_not_finite_logprobs_add_nothing(name: str, bad: float) -> None:
    for logprobs, ref in (([bad, -1.0], [-1.0, -1.5]), ([-1.0, -1.0], [bad, -1.5])):
        leaf = torch.tensor(logprobs, requires_grad=True)
        kl = KL_ESTIMATORS[name](leaf, torch.tensor(ref))
        kl.sum().backward()
        assert leaf.grad is not None
        assert kl[0] == 0.0 and leaf.grad[0] == 0.0
        assert kl[1] != 0.0 and leaf.grad[1] != 0.0


def test_adaptive_controller_equals_mindspeed_rl() -> None:
    controller = KlController(coef=1.0, target=0.1, horizon=100)
    assert controller.update(kl=0.2, num_responses=50).coef == pytest.approx(1.1)
    assert controller.update(kl=0.0, num_responses=50).coef == pytest.approx(0.9)
    assert controller.update(kl=0.105, num_responses=50).coef == pytest.approx(1.025)


def test_controller_keeps_its_coefficient_without_target_or_measurement() -> None:
    assert KlController(coef=0.3).update(kl=9.0, num_responses=50).coef == 0.3
    for kl in (float("nan"), float("inf")):
        assert KlController(coef=0.3, target=0.1).update(kl=kl, num_responses=50).coef == 0.3
