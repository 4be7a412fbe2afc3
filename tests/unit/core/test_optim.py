"""AdamW with masters against a loop written here, and the learning rate against worked numbers."""

from __future__ import annotations

import math

import pytest
import torch

from covey.config.schema import TrainConfig
from covey.optim import Optimizer, learning_rate


def _adamw(weights: list[float], grads: list[list[float]], config: TrainConfig, lr: float, decay: float) -> list[float]:
    """arXiv:1711.05101, algorithm 2, one number at a time in double precision."""
    (beta1, beta2), out = config.betas, []
    for i, w in enumerate(weights):
        m = v = 0.0
        for t, g in enumerate((step[i] for step in grads), start=1):
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            w -= lr * decay * w
            w -= lr * (m / (1 - beta1**t)) / (math.sqrt(v / (1 - beta2**t)) + config.eps)
        out.append(w)
    return out


def test_adamw_equals_the_paper_and_decays_matrices_only() -> None:
    config = TrainConfig(weight_decay=0.1, max_grad_norm=0.0)
    matrix, bias = torch.tensor([[1.0, -2.0]], requires_grad=True), torch.tensor([0.5, 3.0], requires_grad=True)
    optimizer = Optimizer([matrix, bias], config)
    grads = [[0.3, -1.0], [-0.2, 0.4], [2.0, 0.0]]
    for g in grads:
        matrix.grad, bias.grad = torch.tensor([g]), torch.tensor(g)
        optimizer.step(0.01)
    assert matrix[0].tolist() == pytest.approx(_adamw([1.0, -2.0], grads, config, 0.01, 0.1), abs=1e-6)
    assert bias.tolist() == pytest.approx(_adamw([0.5, 3.0], grads, config, 0.01, 0.0), abs=1e-6)
    assert matrix.grad is None


def test_the_norm_before_clipping_is_returned_and_the_gradient_is_clipped() -> None:
    weights = [torch.tensor([[0.0, 0.0]], requires_grad=True), torch.tensor([0.0], requires_grad=True)]
    optimizer = Optimizer(weights, TrainConfig(weight_decay=0.0, max_grad_norm=1.0, betas=(0.0, 0.0), eps=1.0))
    weights[0].grad, weights[1].grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
    assert optimizer.step(1.0) == pytest.approx(5.0)
    # betas 0 and eps 1: the step is g / (|g| + 1), and g was scaled by 1 / 5
    assert weights[0][0, 0].item() == pytest.approx(-0.6 / 1.6, abs=1e-5)
    assert weights[1][0].item() == pytest.approx(-0.8 / 1.8, abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    optimizer = Optimizer([weight], TrainConfig())
    weight.grad = torch.tensor([bad, 1.0])
    assert not math.isfinite(optimizer.step(0.1))
    assert weight.tolist() == [1.0, 2.0]
    assert weight.grad is None


def test_small_steps_survive_in_bfloat16() -> None:
    weight = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    optimizer = Optimizer([weight], TrainConfig(weight_decay=0.0))
    for _ in range(100):  # one step of 1e-4 is far below bfloat16's spacing of 0.0039 below 1
        weight.grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.step(1e-4)
    assert weight.tolist() == pytest.approx([0.99] * 4, abs=0.002)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"schedule": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        ({"schedule": "constant", "warmup_fraction": 0.15}, [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ({"schedule": "linear", "min_lr": 0.5, "warmup_steps": 2}, [0.5, 1, 1, *(1 - i / 16 for i in range(1, 8))]),
        ({"schedule": "cosine"}, [(1 + math.cos(math.pi * i / 10)) / 2 for i in range(10)]),
    ],
)
def test_learning_rate(settings: dict, expected: list[float]) -> None:
    config = TrainConfig(lr=1.0, **settings)
    assert [learning_rate(i, config, 10) for i in range(10)] == pytest.approx(expected)


def test_the_checksum_tells_apart_one_flipped_bit_and_nothing_else() -> None:
    def made(last: float) -> Optimizer:
        weights = [torch.tensor([[1.0, -2.0], [0.5, last]]), torch.tensor([3.0])]
        return Optimizer([w.requires_grad_() for w in weights], TrainConfig())

    first = made(4.0).checksum()
    assert first == made(4.0).checksum() and len(first) == 16
    assert first != made(math.nextafter(4.0, 5.0) + 2**-21).checksum()  # fp32's next number above 4
    transposed = Optimizer([torch.tensor([3.0]).requires_grad_()], TrainConfig())
    assert transposed.checksum() != first
