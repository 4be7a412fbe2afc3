"""Two-pass packed attention against one dense masked softmax in double precision, output and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from covey.models.attention import PackedPlan, attention_forward, varlen_attention
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


def _compare(
    shapes: list[tuple[int, list[int]]], heads: int, kv_heads: int, scale: float, *, reference: bool = False
) -> None:
    segments, total = _segments(shapes)
    generator = torch.Generator().manual_seed(total)
    q, k, v = (torch.randn(n, total, 8, generator=generator) for n in (heads, kv_heads, kv_heads))
    grad = torch.randn(total, heads, 8, generator=generator)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out = PackedPlan(segments, CPU, reference=reference).attend(0, q, k, v, scale)
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
def test_the_reference_equals_dense_attention_too(shapes: list) -> None:
    _compare(shapes, 4, 2, 0.35, reference=True)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_variable_lengths_are_masked_at_the_bottom_right(causal: bool, reference: bool) -> None:
    lens_q, lens_k = [3, 1, 2, 20, 4], [3, 9, 7, 20, 30]
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(lens_q), 4, 8, generator=generator).requires_grad_()
    k, v = (torch.randn(sum(lens_k), 2, 8, generator=generator).requires_grad_() for _ in range(2))
    grad = torch.randn(q.shape, generator=generator)
    out = varlen_attention(q, k, v, lens_q=lens_q, lens_k=lens_k, scale=0.4, causal=causal, reference=reference)
    out.backward(grad)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    sees = torch.zeros(len(q), len(k), dtype=torch.bool)
    row = column = 0
    for num_q, num_k in zip(lens_q, lens_k, strict=True):
        for i in range(num_q):
            sees[row + i, column : column + (num_k - num_q + i + 1 if causal else num_k)] = True
        row, column = row + num_q, column + num_k
    dense_q, dense_k, dense_v = (x.transpose(0, 1) for x in exact)
    expected = _dense(dense_q, dense_k, dense_v, sees, 0.4)
    expected.backward(grad.double())
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    for x, y in zip((q, k, v), exact, strict=True):
        assert x.grad is not None
        torch.testing.assert_close(x.grad.double(), y.grad, atol=2e-5, rtol=1e-4)


def test_lengths_that_do_not_fit_are_refused() -> None:
    q = torch.zeros(5, 2, 8)
    with pytest.raises(ValueError, match="add up to the rows"):
        varlen_attention(q, q, q, lens_q=[2, 2], lens_k=[2, 3], scale=1.0)
    with pytest.raises(ValueError, match=r"sequences \[0\] do not"):
        varlen_attention(q, q, q, lens_q=[3, 2], lens_k=[2, 3], scale=1.0)


def test_gradients_of_a_shared_prompt_are_summed_in_fp32() -> None:
    """600 responses that pull a prompt's value the same way, by 1/2 each: a running sum in bfloat16 stops at 128."""
    segments, total = _segments([(1, [1] * 600)])
    q, k = (torch.zeros(1, total, 8, dtype=torch.bfloat16) for _ in range(2))
    v = torch.zeros(1, total, 8, dtype=torch.bfloat16, requires_grad=True)
    out = PackedPlan(segments, CPU).attend(0, q, k, v, 1.0)
    out.backward(torch.ones_like(out))
    assert v.grad is not None
    # The prompt's own row gives 1, each response half of its gradient: 1 + 600 / 2, and bfloat16's spacing there is 2.
    torch.testing.assert_close(v.grad[0, 0].float(), torch.full((8,), 301.0), atol=1.0, rtol=0)


def test_a_call_without_a_plan_is_refused() -> None:
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="set_attn_implementation"):
        attention_forward(None, q, q, q, None)
