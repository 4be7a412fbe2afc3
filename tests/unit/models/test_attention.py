"""Two-pass packed attention against one dense masked softmax in double precision, output and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.models import kernels
from covey.models.attention import PackedPlan, attention_forward
from covey.types import Segment

CPU = torch.device("cpu")


def _segments(shapes: list[tuple[int, list[int]]]) -> tuple[list[Segment], int]:
    segments, position = [], 0
    for num_prompt, lengths in shapes:
        prompt = len(segments)
        segments.append(Segment(position, position + num_prompt, None))
        position += num_prompt
        for n in lengths:
            if n:
                segments.append(Segment(position, position + n, prompt))
                position += n
    return segments, position


def _mask(segments: list[Segment], total: int) -> torch.Tensor:
    """(T, T) bool, row by row: who sees whom."""
    sees = torch.zeros(total, total, dtype=torch.bool)
    for segment in segments:
        for row in range(segment.start, segment.end):
            sees[row, segment.start : row + 1] = True
            if segment.prompt is not None:
                sees[row, segments[segment.prompt].start : segments[segment.prompt].end] = True
    return sees


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor, scale: float) -> torch.Tensor:
    repeats = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~sees, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def _compare(shapes: list[tuple[int, list[int]]], heads: int, kv_heads: int, scale: float) -> None:
    segments, total = _segments(shapes)
    generator = torch.Generator().manual_seed(total)
    q, k, v = (torch.randn(n, total, 8, generator=generator) for n in (heads, kv_heads, kv_heads))
    grad = torch.randn(total, heads, 8, generator=generator)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = PackedPlan(segments, CPU).attend(0, q, k, v, scale)
    expected = _dense(exact[0], exact[1], exact[2], _mask(segments, total), scale)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    out.backward(grad)
    expected.backward(grad.double())
    for x, y in zip(inputs, exact, strict=True):
        assert x.grad is not None
        assert y.grad is not None
        torch.testing.assert_close(x.grad.double(), y.grad, atol=2e-5, rtol=1e-4)


_shapes = st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(0, 30), max_size=6)), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(shapes=_shapes, heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]), scale=st.sampled_from([0.35, 1.0]))
def test_equals_dense_attention(shapes: list[tuple[int, list[int]]], heads: tuple[int, int], scale: float) -> None:
    _compare(shapes, *heads, scale)


@pytest.mark.parametrize("shapes", [[(5, [4, 7]), (8, [3]), (33, [20, 1, 20])], [(1, [1, 1]), (1, [])]])
def test_the_matmul_kernels_equal_dense_attention_too(shapes: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_CPU", kernels._MATMUL)
    _compare(shapes, 4, 2, 0.35)


def test_kernels_without_masks_get_prompts_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(q, k, v, causal, mask, scale):
        assert mask is None
        return kernels._matmul_forward(q, k, v, causal, mask, scale)

    without = kernels.Kernels(forward, kernels._matmul_backward, masks=False)
    monkeypatch.setattr(kernels, "_CPU", without)
    _compare([(9, [4, 7]), (10, [3]), (10, [2, 2]), (11, [20])], 4, 2, 0.35)


def test_a_call_without_a_plan_is_refused() -> None:
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="set_attn_implementation"):
        attention_forward(None, q, q, q, None)
