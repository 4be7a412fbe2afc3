"""A model taken apart into stages in one process: run one after the other, they are the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.distributed import cases

from covey.models.attention import PackedPlan
from covey.models.scoring import ScoringModel
from covey.models.stages import Stage, stage_parameters
from covey.types import Segment

NUM_LAYERS = 5
CHUNKS = [range(2), range(2, 3), range(3, 4), range(4, 5)]  # of two ranks: 0 and 2, 1 and 3
TOKENS = torch.arange(7) * 5 % cases.VOCAB
SEGMENTS = [Segment(0, 3, None), Segment(3, 5, 0), Segment(5, 7, 0)]
POSITIONS = torch.tensor([0, 1, 2, 3, 4, 3, 4])
ROWS = torch.tensor([2, 3, 4, 2, 5])


def _scores(model: Any, stage: Stage | None, chunk: int = 0, hidden: torch.Tensor | None = None) -> Any:
    scoring = ScoringModel(model, temperature=0.7, logits_chunk_bytes=4096, whole=False, stage=stage)
    plan = PackedPlan(SEGMENTS, cases.CPU)
    return scoring(TOKENS, POSITIONS, plan, ROWS, TOKENS[:5], hidden=hidden, chunk=chunk)


def _stages(model: Any) -> list[tuple[Any, Stage]]:
    models = [copy.deepcopy(model) for _ in range(2)]
    return [(m, Stage(m, CHUNKS, rank=rank, num_ranks=2)) for rank, m in enumerate(models)]


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_chunks_one_after_the_other_are_the_model(family: str) -> None:
    model = cases.model(family, num_layers=NUM_LAYERS)
    expected = _scores(model, None)
    stages = _stages(model)
    hidden: Any = None
    for chunk in range(4):
        hidden = _scores(*stages[chunk % 2], chunk, hidden)
    for found, wanted in zip(hidden, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_ranks_hold_the_model_together_under_its_own_names(family: str) -> None:
    model = cases.model(family, num_layers=NUM_LAYERS)
    whole = dict(model.named_parameters())
    (first, first_stage), (last, last_stage) = _stages(model)
    held = [dict(m.named_parameters()) for m in (first, last)]
    assert held[0].keys() | held[1].keys() == whole.keys() == first_stage.parameters.keys()
    tied = {"model.embed_tokens.weight"} if family == "qwen2" else set()
    assert held[0].keys() & held[1].keys() == tied == first_stage.tied == last_stage.tied
    assert {int(n.split(".")[2]) for n in held[1] if ".layers." in n} == {2, 4}
    counts = [sum(p.numel() for p in one.values()) for one in held]
    assert stage_parameters(model, CHUNKS, 2) == [(count, count) for count in counts]
    for name, weight in first_stage.parameters.items():
        assert name in held[weight.owner]
        assert weight.shape == whole[name].shape


def test_frozen_parameters_are_held_but_not_trained() -> None:
    model = cases.model("llama", num_layers=NUM_LAYERS)
    model.base_model.embed_tokens.requires_grad_(False)
    total, trained = stage_parameters(model, [range(NUM_LAYERS)], 1)[0]
    assert total == sum(p.numel() for p in model.parameters())
    assert total - trained == cases.VOCAB * 64


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_absent_layers_can_be_filled_and_are_empty_again(family: str) -> None:
    model = cases.model(family, num_layers=NUM_LAYERS)
    expected = _scores(model, None)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for stage_model, stage in _stages(model):
        before = [name for name, _ in stage_model.named_parameters()]
        with stage.whole(weights):
            assert [name for name, _ in stage_model.named_parameters()] == list(weights)
            found = _scores(stage_model, None)
        for one, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(one, wanted, rtol=0, atol=1e-6)
        assert [name for name, _ in stage_model.named_parameters()] == before
        with stage.whole({}):
            missing = [p for name, p in stage_model.named_parameters() if name not in before]
        assert missing
        assert all(p.numel() == 0 for p in missing)


def test_a_family_without_a_row_is_refused() -> None:
    model = cases.model("llama")
    model.config.model_type = "mamba"
    with pytest.raises(ValueError, match=r"parallel\.pp=2 is not available for model_type 'mamba'"):
        Stage(model, [range(1), range(1, 2)], rank=0, num_ranks=2)
