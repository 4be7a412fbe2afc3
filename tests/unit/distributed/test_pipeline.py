"""Micro-batches of different lengths through chunks that are plain functions: values and gradients worked by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.harness import run
from torch import Tensor

from covey.distributed import mesh as meshes
from covey.distributed.agreement import CollectiveError
from covey.distributed.pipeline import Pipeline

CPU = torch.device("cpu")
LENGTHS = [3, 1, 5, 2, 4]


def _products(chunks_per_rank: int) -> dict[str, Any]:
    """Chunk c multiplies by w_c = c + 2; the loss of a micro-batch is the sum of its outputs."""
    m = meshes.start(communication="gloo", device=CPU, pp=2)
    pipeline = Pipeline(m, chunks_per_rank=chunks_per_rank, width=2, dtype=torch.float32, device=CPU)
    weights = {c: torch.tensor(float(c + 2), requires_grad=True) for c in range(m.pp_rank, 2 * chunks_per_rank, 2)}
    losses: dict[int, float] = {}
    finished = []

    def forward(chunk: int, micro: int, hidden: Tensor | None) -> Tensor:
        if hidden is None:
            hidden = torch.full((1, LENGTHS[micro], 2), float(micro + 1))
        out = hidden * weights[chunk]
        if chunk + 1 < pipeline.num_chunks:
            return out
        losses[micro] = float(out.sum())
        return out.sum()

    def backward(chunk: int, output: Tensor, gradient: Tensor | None, last: bool) -> None:
        output.backward(gradient)
        if last:
            finished.append(chunk)

    pipeline.run(LENGTHS, forward, backward)
    trained = dict(losses)
    losses.clear()
    with torch.no_grad():
        pipeline.run(LENGTHS[::-1][:2], lambda c, i, h: forward(c, len(LENGTHS) - 1 - i, h))
    meshes.stop()
    grads = {chunk: float(weight.grad) for chunk, weight in weights.items() if weight.grad is not None}
    return {"losses": trained, "again": losses, "gradients": grads, "finished": finished}


@pytest.mark.parametrize("chunks_per_rank", [1, 2])
def test_values_and_gradients_of_unequal_micro_batches(chunks_per_rank: int) -> None:
    found = run(2, _products, chunks_per_rank)
    product = 2 * 3 if chunks_per_rank == 1 else 2 * 3 * 4 * 5
    sums = [2 * length * (micro + 1) for micro, length in enumerate(LENGTHS)]  # of the first inputs
    assert found[0]["losses"] == {}
    assert found[1]["losses"] == {micro: total * product for micro, total in enumerate(sums)}
    assert found[1]["again"] == {4: sums[4] * product, 3: sums[3] * product}
    gradients = found[0]["gradients"] | found[1]["gradients"]
    assert gradients == {chunk: sum(sums) * product / (chunk + 2) for chunk in range(2 * chunks_per_rank)}
    for rank in (0, 1):
        assert sorted(found[rank]["finished"]) == list(range(rank, 2 * chunks_per_rank, 2))


def _left_alone() -> str:
    m = meshes.start(communication="gloo", device=CPU, pp=2, timeout_s=3.0)
    pipeline = Pipeline(m, chunks_per_rank=1, width=2, dtype=torch.float32, device=CPU)
    if m.pp_rank == 0:
        import time

        time.sleep(5.0)
        return "late"
    with pytest.raises(CollectiveError) as caught:
        pipeline.run([3], lambda chunk, micro, hidden: None)
    return str(caught.value)


def test_a_stage_that_does_not_send_is_named() -> None:
    message = run(2, _left_alone)[1]
    assert "forward of the pipeline" in message
    assert "[0, 1]" in message
