"""What the native engine samples for a seed does not depend on how the work is arranged."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from covey.rollout.engine import Sampling
from covey.rollout.native import NativeEngine
from covey.types import Group, Prompt

LENGTHS = (1, 5, 80, 6, 120, 118)
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # keys and values, layers, kv heads, head dim, fp32


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=80,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        max_position_embeddings=512,
    )
    model = Qwen2ForCausalLM(config)
    model.set_attn_implementation("covey")
    return model


def make_prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(2)
    return [
        Prompt(uid, torch.randint(1, 80, (length,), generator=generator).tolist(), "")
        for uid, length in enumerate(LENGTHS)
    ]


def sample(
    model: PreTrainedModel, prompts: list[Prompt], sampling: Sampling, *, seqs: int = 100, cache: int = 1 << 24
) -> dict[int, Group]:
    engine = NativeEngine(model, stop_token_ids=[7, 8, 9], decode=str, max_num_seqs=seqs, kv_cache_bytes=cache)
    return {group.prompt.uid: group for group in engine.generate(prompts, sampling)}


def assert_same(left: dict[int, Group], right: dict[int, Group]) -> None:
    assert left.keys() == right.keys()
    for uid in left:
        for one, other in zip(left[uid].responses, right[uid].responses, strict=True):
            assert one.token_ids == other.token_ids
            assert one.num_kept == other.num_kept
            assert one.finish_reason == other.finish_reason
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=0)


REQUESTS = {
    "greedy": Sampling(num_samples=3, max_response_length=20, temperature=0.0),
    "single": Sampling(num_samples=1, max_response_length=40, seed=2),
    "sampled": Sampling(num_samples=5, max_response_length=40, seed=4, step=9),
    "filtered": Sampling(num_samples=5, max_response_length=36, temperature=1.2, top_k=30, top_p=0.9, min_p=0.01),
}


@pytest.mark.parametrize("request_name", REQUESTS)
def test_independent_of_the_number_of_places(model: PreTrainedModel, request_name: str) -> None:
    sampling = REQUESTS[request_name]
    base = sample(model, make_prompts(), sampling)
    lengths = {len(response.token_ids) for group in base.values() for response in group.responses}
    assert len(lengths) > 1  # rows leave at different times
    for seqs in (4, 16):
        assert_same(base, sample(model, make_prompts(), sampling, seqs=seqs))
    assert_same({2: base[2]}, sample(model, make_prompts()[2:3], sampling, seqs=1))


@pytest.mark.parametrize("request_name", REQUESTS)
def test_independent_of_order_and_company(model: PreTrainedModel, request_name: str) -> None:
    sampling = REQUESTS[request_name]
    base = sample(model, make_prompts(), sampling)
    assert_same(base, sample(model, make_prompts()[::-1], sampling, seqs=12))
    alone: dict[int, Group] = {}
    for prompt in make_prompts():
        alone |= sample(model, [prompt], sampling)
    assert_same(base, alone)


def test_independent_of_the_number_of_samples_and_the_length_limit(model: PreTrainedModel) -> None:
    few = sample(model, make_prompts(), Sampling(num_samples=2, max_response_length=10))
    many = sample(model, make_prompts(), Sampling(num_samples=6, max_response_length=33))
    for uid, group in few.items():
        for short, long in zip(group.responses, many[uid].responses, strict=False):
            assert short.token_ids == long.token_ids[:10]


def test_seed_and_step_change_the_responses(model: PreTrainedModel) -> None:
    seen = [
        sample(model, make_prompts()[2:3], Sampling(num_samples=2, max_response_length=20, seed=seed, step=step))
        for seed, step in ((0, 0), (1, 0), (0, 1), (0, -1))
    ]
    assert len({tuple(groups[2].responses[0].token_ids) for groups in seen}) == 4


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    seqs=st.integers(1, 40),
    samples=st.integers(1, 9),
    cache_tokens=st.integers(120 + 24, 1200),
    chosen=st.sets(st.integers(0, len(LENGTHS) - 1), min_size=1),
)
def test_any_limits_give_the_same_responses(
    model: PreTrainedModel, seqs: int, samples: int, cache_tokens: int, chosen: set[int]
) -> None:
    prompts = [make_prompts()[i] for i in sorted(chosen)]
    sampling = Sampling(num_samples=samples, max_response_length=16)
    assert_same(
        sample(model, prompts, sampling),
        sample(model, prompts, sampling, seqs=seqs, cache=cache_tokens * TOKEN_BYTES),
    )
