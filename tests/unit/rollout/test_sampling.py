"""The sampler against exact probabilities and against a loop that applies the filters one token at a time."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from covey.rollout.engine import Sampling
from covey.rollout.sampling import draw, uniforms


def sampling(**options: float) -> Sampling:
    return Sampling(**({"num_samples": 1, "max_response_length": 8} | options))  # type: ignore[arg-type]


def kept_set(logits: list[float], *, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Renormalised probabilities of the kept tokens, one token after another in float64."""
    largest = max(logits)
    weights = [math.exp((x - largest) / temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    if top_k:
        order = order[:top_k]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if kept and ((top_p < 1 and mass >= top_p * total) or weights[i] < min_p * weights[order[0]]):
            break
        kept.append(i)
        mass += weights[i]
    return {i: weights[i] / mass for i in kept}


@pytest.mark.parametrize("vocab", [7, 512, 1000, 1536])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draw_inverts_the_cumulative_distribution(vocab: int, temperature: float) -> None:
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0)) * 2
    probs = (logits[0].double() / temperature).softmax(-1).numpy()
    grid = (np.arange(4000) + 0.5) / 4000
    drawn = draw(logits.expand(4000, -1), torch.tensor(grid, dtype=torch.float32), sampling(temperature=temperature))
    upper = probs.cumsum()
    expected = np.searchsorted(upper, grid, side="right")
    away = np.abs(grid - upper[expected]).clip(max=np.abs(grid - (upper - probs)[expected])) > 1e-6
    assert away.mean() > 0.95
    np.testing.assert_array_equal(drawn.token_ids.numpy()[away], expected[away])
    np.testing.assert_allclose(drawn.logprobs.numpy(), np.log(probs[drawn.token_ids.numpy()]), atol=2e-6)
    assert drawn.num_kept is None


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9, "min_p": 0.02}]
)
def test_frequencies_match_the_probabilities(options: dict[str, float]) -> None:
    count = 40000
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1)) * 1.5
    request = sampling(max_response_length=count, temperature=1.3, **options)
    numbers = torch.from_numpy(uniforms(request, uid=3, sample=1))
    drawn = draw(logits.expand(count, -1), numbers, request)
    defaults = {"temperature": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    exact = kept_set(logits[0].tolist(), **(defaults | options))  # type: ignore[arg-type]
    seen = torch.bincount(drawn.token_ids, minlength=40)
    assert set(seen.nonzero().flatten().tolist()) <= set(exact)
    chi_square = sum((seen[i].item() - count * p) ** 2 / (count * p) for i, p in exact.items())
    freedom = len(exact) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def assert_rows_match_the_loop(logits: Tensor, drawn_kept: Tensor, drawn: tuple[Tensor, Tensor], options: dict) -> None:
    for row in range(len(logits)):
        exact = kept_set(logits[row].tolist(), **options)
        token = drawn[0][row].item()
        assert drawn_kept[row].item() == len(exact)
        assert token in exact
        assert drawn[1][row].item() == pytest.approx(math.log(exact[int(token)]), abs=3e-6)


@pytest.mark.parametrize("top_k", [0, 1, 20, 300])
@pytest.mark.parametrize("top_p", [1.0, 0.3, 0.97])
@pytest.mark.parametrize("min_p", [0.0, 0.01, 0.5])
def test_kept_sets_match_a_loop(top_k: int, top_p: float, min_p: float) -> None:
    """Sharp rows close within the first look, flat ones need the full sort: both occur here."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(24, 700, generator=generator) * torch.linspace(0.05, 6, 24).unsqueeze(1)
    options = {"temperature": 0.8, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    drawn = draw(logits, torch.rand(24, generator=generator), sampling(**options))
    if drawn.num_kept is None:
        assert not top_k and top_p == 1 and not min_p
        drawn = drawn._replace(num_kept=torch.full((24,), 700))
    assert drawn.num_kept is not None
    assert_rows_match_the_loop(logits, drawn.num_kept, (drawn.token_ids, drawn.logprobs), options)


def test_temperature_zero_takes_the_most_likely_token_with_logprob_zero() -> None:
    logits = torch.tensor([[0.1, 2.0, 1.9], [3.0, -1.0, 2.0]])
    drawn = draw(logits, torch.tensor([0.99, 0.99]), sampling(temperature=0.0))
    assert drawn.token_ids.tolist() == [1, 0]
    assert drawn.logprobs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.999999}])
def test_extreme_uniforms_never_draw_an_impossible_token(options: dict[str, float]) -> None:
    logits = torch.full((2, 1024), -torch.inf)
    logits[:, [100, 101, 700]] = torch.tensor([0.3, 0.2, 0.1])
    drawn = draw(logits, torch.tensor([0.0, 1 - 2.0**-24]), sampling(**options))
    assert drawn.token_ids.tolist() == ([100, 700])
    assert torch.isfinite(drawn.logprobs).all()


def test_rows_do_not_influence_each_other() -> None:
    generator = torch.Generator().manual_seed(3)
    logits, numbers = torch.randn(9, 600, generator=generator), torch.rand(9, generator=generator)
    for request in (sampling(), sampling(top_p=0.9)):
        together = draw(logits, numbers, request)
        alone = [draw(logits[i : i + 1], numbers[i : i + 1], request) for i in range(9)]
        assert together.token_ids.tolist() == [one.token_ids.item() for one in alone]


def test_streams_are_fixed_uniform_and_distinct() -> None:
    request = sampling(max_response_length=20000, seed=5, step=-2)
    base = uniforms(request, uid=7, sample=0)
    np.testing.assert_array_equal(base, uniforms(request, uid=7, sample=0))
    # the documented definition, spelled out once more
    key, counter = np.array([5, 2**64 - 2], np.uint64), np.array([0, 0, 7, 0], np.uint64)
    bits = np.random.Philox(key=key, counter=counter).random_raw(3)
    assert base[:3].tolist() == [(int(word) >> 40) / 2**24 for word in bits]
    others = [
        uniforms(request, uid=7, sample=1),
        uniforms(request, uid=8, sample=0),
        uniforms(sampling(max_response_length=20000, seed=6, step=-2), uid=7, sample=0),
        uniforms(sampling(max_response_length=20000, seed=5, step=-1), uid=7, sample=0),
    ]
    for numbers in [base, *others]:
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert abs(numbers.mean() - 0.5) < 0.01
        assert abs(numbers.var() - 1 / 12) < 0.002
    for numbers in others:
        assert abs(np.corrcoef(base, numbers)[0, 1]) < 0.03


def test_a_longer_limit_continues_the_same_stream() -> None:
    short, long = (uniforms(sampling(max_response_length=n), uid=1, sample=2) for n in (5, 50))
    np.testing.assert_array_equal(short, long[:5])
