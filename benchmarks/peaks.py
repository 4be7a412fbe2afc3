"""How fast this machine multiplies matrices of the model's own shapes, with nothing in between: the ceiling of a step.

One pass over all matrices of the model in order, so that caches hold no more than they can in a real step. Attention,
norms, softmax and sampling are not part of it: a share of 100 % would mean that they cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import offline
import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Work:
    """Multiplications and the time they need alone."""

    seconds: float
    flops: float


class Peak:
    """The model's matrices, without the model."""

    def __init__(self, size: offline.Size) -> None:
        self.body = [torch.randn(outputs, inputs) for inputs, outputs in size.matmuls]
        self.head = torch.randn(size.vocab, size.width)

    def forward(self, rows: int, head_rows: int) -> Work:
        """`rows` tokens through the body, `head_rows` of them through the head."""
        inputs = {weight.shape[1]: torch.randn(rows, weight.shape[1]) for weight in self.body}
        last = torch.randn(head_rows, self.head.shape[1])

        def run() -> None:
            for weight in self.body:
                F.linear(inputs[weight.shape[1]], weight)
            F.linear(last, self.head)

        return Work(_fastest(run), self._flops(rows, head_rows))

    def training(self, rows: int, head_rows: int, chunk: int) -> Work:
        """Forward, and the two products of backward, for `rows` tokens; the head in chunks of `chunk` rows."""
        body = [
            (weight, torch.randn(rows, weight.shape[1]), torch.randn(rows, weight.shape[0])) for weight in self.body
        ]
        sizes = [min(chunk, head_rows - start) for start in range(0, head_rows, chunk)]
        last = torch.randn(chunk, self.head.shape[1])
        gradient = torch.randn(chunk, self.head.shape[0])

        def products(weight: torch.Tensor, x: torch.Tensor, g: torch.Tensor) -> None:
            F.linear(x, weight)
            torch.mm(g, weight)
            torch.mm(g.T, x)

        def run() -> None:
            for weight, x, g in body:
                products(weight, x, g)
            for size in sizes:
                products(self.head, last[:size], gradient[:size])

        return Work(_fastest(run), 3 * self._flops(rows, head_rows))

    def _flops(self, rows: int, head_rows: int) -> float:
        return 2.0 * (rows * sum(weight.numel() for weight in self.body) + head_rows * self.head.numel())


@torch.no_grad()
def _fastest(run: Callable[[], None], repeats: int = 3) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
