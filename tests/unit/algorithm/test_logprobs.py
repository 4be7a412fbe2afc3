"""Chunked log-probabilities and entropy against torch's log_softmax, values and gradients, in double precision."""

from __future__ import annotations

import pytest
import torch

from covey.algorithm.logprobs import chunk_rows, logprobs_and_entropy


def _inputs(n: int = 11, width: int = 6, vocab: int = 13) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(n, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    return hidden, weight, torch.randint(0, vocab, (n,))


def _reference(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, t: float):
    logp = ((hidden.double() @ weight.double().t()) / t).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("add_to_grad", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("use_logprobs", "use_entropy"), [(True, True), (True, False), (False, True)])
def test_equals_log_softmax(
    temperature: float, rows: int, use_logprobs: bool, use_entropy: bool, add_to_grad: bool
) -> None:
    hidden, weight, targets = _inputs()
    a, b = torch.randn(11) * use_logprobs, torch.randn(11) * use_entropy
    results = []
    for chunked in (True, False):
        hidden.grad = weight.grad = None
        if chunked:
            lp, entropy = logprobs_and_entropy(
                hidden, weight, targets, temperature=temperature, rows_per_chunk=rows, add_to_grad=add_to_grad
            )
        else:
            lp, entropy = _reference(hidden, weight, targets, temperature)
        terms = [(lp * a).sum()] if use_logprobs else []
        terms += [(entropy * b).sum()] if use_entropy else []
        torch.stack(terms).sum().backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        results.append((lp.detach().float(), entropy.detach().float(), hidden.grad, weight.grad))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("use_entropy", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 11])
def test_the_kept_set_is_renormalised(rows: int, use_entropy: bool) -> None:
    """Against a loop: sort, keep the first num_kept (and the target), softmax over those alone."""
    hidden, weight, targets = _inputs()
    num_kept = torch.tensor([1, 2, 3, 13, 5, 1, 7, 12, 4, 6, 2])
    logits = (hidden.double() @ weight.double().t()) / 0.8
    expected_lp, expected_entropy = [], []
    for row, k, target in zip(logits, num_kept, targets, strict=True):
        kept = sorted({*row.argsort(descending=True)[:k].tolist(), int(target)})
        logp = row[kept].log_softmax(-1)
        expected_lp.append(logp[kept.index(int(target))])
        expected_entropy.append(-(logp.exp() * logp).sum())
    a, b = torch.randn(11), torch.randn(11) * use_entropy
    (torch.stack(expected_lp) @ a.double() + torch.stack(expected_entropy) @ b.double()).backward()
    expected = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    lp, entropy = logprobs_and_entropy(hidden, weight, targets, temperature=0.8, rows_per_chunk=rows, num_kept=num_kept)
    torch.testing.assert_close(lp.double(), torch.stack(expected_lp), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), torch.stack(expected_entropy), atol=2e-6, rtol=1e-5)
    ((lp @ a) + (entropy @ b if use_entropy else 0.0)).backward()
    torch.testing.assert_close(hidden.grad, expected[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weight.grad, expected[1], atol=1e-5, rtol=1e-4)


def test_gradients_add_up_over_calls_in_place() -> None:
    hidden, weight, targets = _inputs()
    for _ in range(2):
        lp, _ = logprobs_and_entropy(hidden, weight, targets, rows_per_chunk=3, add_to_grad=True)
        lp.sum().backward()
    twice = weight.grad
    weight.grad = None
    lp, _ = logprobs_and_entropy(hidden, weight, targets, rows_per_chunk=3)
    lp.sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(twice, 2 * weight.grad)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, targets = _inputs()
    weight.requires_grad_(False)
    lp, _ = logprobs_and_entropy(hidden, weight, targets, rows_per_chunk=3, add_to_grad=True)
    lp.sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


def test_no_rows() -> None:
    hidden, weight, targets = _inputs()
    lp, entropy = logprobs_and_entropy(hidden[:0], weight, targets[:0], rows_per_chunk=3)
    assert lp.shape == entropy.shape == (0,)


def test_chunk_rows() -> None:
    assert chunk_rows(1024, 2**20) == 256
    assert chunk_rows(10**9, 2**20) == 1
