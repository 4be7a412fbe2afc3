"""Layers spread over ranks: the gradient of one process, the same weights after steps, the same tokens sampled."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.distributed import cases
from tests.distributed.harness import run

from covey.distributed import mesh as meshes
from covey.policy import Policy

NUM_LAYERS = 5
PLAIN = ({"pp": 2}, {})
UNEVEN = ({"pp": 2}, {"pp_layers": [4, 1]})
INTERLEAVED = ({"pp": 2}, {"pp_chunks": 2})
UNEVEN_INTERLEAVED = ({"pp": 2}, {"pp_chunks": 2, "pp_layers": [1, 2, 1, 1]})
Layout = tuple[dict[str, Any], dict[str, Any]]


def _policy(family: str, layout: Layout) -> Policy:
    sizes, options = layout
    m = meshes.start(communication="gloo", device=cases.CPU, **sizes)
    return cases.policy_of(cases.model(family, num_layers=NUM_LAYERS), m, **options)


def _gradients(layouts: list[tuple[str, Layout]]) -> list[dict[str, Any]]:
    found = [cases.measure(_policy(family, layout), {"loss": "grpo"}) for family, layout in layouts]
    meshes.stop()
    return found


@functools.cache
def _alone() -> dict[str, dict[str, Any]]:
    found = run(1, _gradients, [(family, ({}, {})) for family in cases.FAMILIES])[0]
    return dict(zip(cases.FAMILIES, found, strict=True))


def _check_gradients(world: int, layouts: list[tuple[str, Layout]]) -> None:
    """On every rank: its parameters' whole gradients, together those of one process; norm, and statistics of a step."""
    ranks = run(world, _gradients, layouts)
    for i, (family, layout) in enumerate(layouts):
        expected = _alone()[family]
        size = sum(float(g.double().square().sum()) for g in expected["gradients"].values()) ** 0.5
        together: dict[str, torch.Tensor] = {}
        for rank in ranks:
            found = rank[i]
            for name, gradient in found["gradients"].items():
                assert name not in together or torch.equal(together[name], gradient), (name, layout)
            together |= found["gradients"]
            assert found["norm"] == pytest.approx(size, rel=1e-5), layout
            torch.testing.assert_close(found["logprobs"], expected["logprobs"], rtol=0, atol=5e-6)
            for name, value in expected["stats"].items():
                assert found["stats"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, layout)
        assert cases.relative(together, expected["gradients"]) < 1e-5, (family, layout)


def test_gradient_of_two_stages_is_that_of_one_process() -> None:
    layouts = [(family, layout) for family in cases.FAMILIES for layout in (PLAIN, INTERLEAVED)]
    _check_gradients(2, [*layouts, ("qwen2", UNEVEN), ("qwen3", UNEVEN_INTERLEAVED)])
