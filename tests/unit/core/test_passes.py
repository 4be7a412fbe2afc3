"""Passes over micro-batches on one process: scores and gradients of plain transformers, sequence by sequence."""

from __future__ import annotations

from typing import Any

import torch
from tests.distributed import cases
from torch import Tensor

from covey.distributed.mesh import Mesh
from covey.models.packing import pack
from covey.models.scoring import ScoringModel
from covey.passes import Passes
from covey.types import PackedBatch

TEMPERATURE = 0.8


def _passes(model: Any) -> tuple[Passes, list[PackedBatch]]:
    scoring = ScoringModel(model, temperature=TEMPERATURE, logits_chunk_bytes=4096)
    batches = pack(cases.batch().groups, max_tokens=60, device=cases.CPU)
    assert len(batches) > 1
    return Passes(scoring, Mesh(), tp=None, sharding=None, part=None, device=cases.CPU), batches


def _sequence_by_sequence(model: Any) -> list[Tensor]:
    """Log-probabilities of every response's tokens, from the model's own forward."""
    model.set_attn_implementation("sdpa")
    found = []
    for group in cases.batch().groups:
        for response in group.responses:
            prompt, ids = group.prompt.input_ids, response.token_ids
            logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            found.append((logits / TEMPERATURE).log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1))
    return found


def test_scores_are_the_models_own_and_carry_no_gradient() -> None:
    passes, batches = _passes(cases.model("llama"))
    expected = torch.cat(_sequence_by_sequence(cases.model("llama"))).detach()
    found = torch.zeros_like(expected)
    for batch, logprobs, entropy in passes.score(batches):
        assert not logprobs.requires_grad
        assert bool((entropy > 0).all())
        found[batch.token_index] = logprobs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_gradients_of_micro_batches_add_up_to_that_of_all_sequences() -> None:
    model, plain = cases.model("qwen2"), cases.model("qwen2")
    passes, batches = _passes(model)
    seen = []

    def loss_of(batch: PackedBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        seen.append(batch)
        return -(logprobs * (batch.token_index % 3)).sum()

    passes.accumulate(batches, loss_of)
    assert seen == batches
    expected = torch.cat(_sequence_by_sequence(plain))
    (-(expected * (torch.arange(len(expected)) % 3)).sum()).backward()
    gradients = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (model, plain)]
    assert cases.relative(gradients[0], gradients[1]) < 1e-5
