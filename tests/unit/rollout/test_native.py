"""The native engine against Hugging Face: greedy generation, log-probabilities, stop tokens, limits."""

from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from covey.rollout.engine import Sampling
from covey.rollout.kv_cache import DecodePlan
from covey.rollout.native import NativeEngine
from covey.types import Group, Prompt

VOCAB = 97


def tiny_model(kind: str = "qwen2", *, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    size: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "initializer_range": 0.2,
        "max_position_embeddings": 512,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    model: Any
    match kind:
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**size, tie_word_embeddings=True))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**size, head_dim=16))
        case _:
            model = LlamaForCausalLM(LlamaConfig(**size))
    return model.to(dtype)


def make_prompts(*lengths: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(1)
    return [
        Prompt(uid=10 + i, input_ids=torch.randint(1, VOCAB, (n,), generator=generator).tolist(), text="")
        for i, n in enumerate(lengths)
    ]


def make_engine(model: PreTrainedModel, **options: Any) -> NativeEngine:
    model.set_attn_implementation("covey")
    defaults = {"stop_token_ids": [], "decode": str, "max_num_seqs": 64, "kv_cache_bytes": 1 << 24}
    return NativeEngine(model, **(defaults | options))


def token_bytes(model: PreTrainedModel) -> int:
    config = model.config
    width = config.num_key_value_heads * (getattr(config, "head_dim", None) or 8)
    return 2 * config.num_hidden_layers * width * 4


def reference_logprobs(model: PreTrainedModel, group: Group, *, temperature: float = 1.0) -> list[torch.Tensor]:
    """One unpadded forward of the plain model for each response."""
    model.set_attn_implementation("sdpa")
    result = []
    for response in group.responses:
        ids = torch.tensor([group.prompt.input_ids + response.token_ids])
        start = len(group.prompt.input_ids)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, start - 1 : -1].float() / temperature
        result.append(logits.log_softmax(-1).gather(1, ids[0, start:, None])[:, 0])
    return result


@pytest.mark.parametrize(
    ("kind", "kv_heads"), [("qwen2", 2), ("qwen2", 4), ("qwen3", 2), ("qwen3", 1), ("llama", 2), ("llama", 4)]
)
def test_logprobs_equal_a_plain_forward(kind: str, kv_heads: int) -> None:
    model = tiny_model(kind, kv_heads=kv_heads)
    prompts = make_prompts(1, 9, 60, 61, 3, 130)
    engine = make_engine(model, stop_token_ids=[5, 6], max_num_seqs=10)
    sampling = Sampling(num_samples=3, max_response_length=40, temperature=0.9)
    gaps = torch.cat(
        [
            (reference - torch.tensor(response.logprobs)).abs()
            for group in engine.generate(prompts, sampling)
            for reference, response in zip(
                reference_logprobs(model, group, temperature=0.9), group.responses, strict=True
            )
        ]
    )
    assert len(gaps) > 200
    assert gaps.max() < 1e-4
    assert gaps.mean() < 1e-6


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_greedy_equals_hugging_face_generate(kind: str) -> None:
    model = tiny_model(kind)
    prompts = make_prompts(7, 1, 50, 49)
    groups = make_engine(model).generate(prompts, Sampling(num_samples=1, max_response_length=20, temperature=0.0))
    model.set_attn_implementation("sdpa")
    for prompt, group in zip(prompts, groups, strict=True):
        ids = torch.tensor([prompt.input_ids])
        expected = model.generate(  # type: ignore[operator]
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
        )
        assert group.responses[0].token_ids == expected[0, ids.shape[1] :].tolist()
        assert group.responses[0].logprobs == [0.0] * 20


def test_a_response_ends_at_the_first_of_several_stop_ids() -> None:
    model = tiny_model()
    sampling = Sampling(num_samples=8, max_response_length=30)
    free = make_engine(model).generate(make_prompts(6, 40), sampling)
    stops = {3, 17, 44, 71}
    stopped = make_engine(model, stop_token_ids=stops, decode=lambda ids: " ".join(map(str, ids))).generate(
        make_prompts(6, 40), sampling
    )
    reasons = set()
    for before, after in zip(free, stopped, strict=True):
        for full, cut in zip(before.responses, after.responses, strict=True):
            hits = [i for i, token in enumerate(full.token_ids) if token in stops]
            expected = full.token_ids[: hits[0] + 1] if hits else full.token_ids
            assert cut.token_ids == expected
            assert len(cut.logprobs) == len(expected)
            assert cut.finish_reason == ("stop" if hits else "length")
            assert cut.text == " ".join(map(str, expected[:-1] if hits else expected))
            reasons.add(cut.finish_reason)
    assert reasons == {"stop", "length"}


def test_stop_at_the_last_allowed_token_counts_as_stop() -> None:
    model = tiny_model()
    sampling = Sampling(num_samples=1, max_response_length=4, temperature=0.0)
    last = make_engine(model).generate(make_prompts(5), sampling)[0].responses[0].token_ids[-1]
    response = make_engine(model, stop_token_ids=[last]).generate(make_prompts(5), sampling)[0].responses[0]
    assert response.finish_reason == "stop"


def test_one_token_responses_need_no_decode_step() -> None:
    model = tiny_model()
    groups = make_engine(model).generate(make_prompts(1, 12), Sampling(num_samples=5, max_response_length=1))
    for group in groups:
        for reference, response in zip(reference_logprobs(model, group), group.responses, strict=True):
            assert len(response.token_ids) == 1
            assert response.finish_reason == "length"
            assert response.logprobs[0] == pytest.approx(reference.item(), abs=1e-5)


def test_filtered_logprobs_are_of_the_kept_set() -> None:
    model = tiny_model()
    sampling = Sampling(num_samples=4, max_response_length=12, temperature=0.7, top_k=6, top_p=0.9)
    group = make_engine(model).generate(make_prompts(9), sampling)[0]
    model.set_attn_implementation("sdpa")
    sizes = set()
    for response in group.responses:
        ids = torch.tensor([group.prompt.input_ids + response.token_ids])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(group.prompt.input_ids) - 1 : -1] / 0.7
        assert response.num_kept is not None
        for row, token, logprob, kept in zip(
            logits, response.token_ids, response.logprobs, response.num_kept, strict=True
        ):
            values, order = row.sort(descending=True)
            assert token in order[:kept].tolist()
            assert logprob == pytest.approx((row[token] - values[:kept].logsumexp(0)).item(), abs=1e-4)
            sizes.add(kept)
    assert len(sizes) > 1
    assert max(sizes) <= 6
    unfiltered = make_engine(model).generate(make_prompts(9), Sampling(num_samples=1, max_response_length=2))
    assert unfiltered[0].responses[0].num_kept is None


def test_no_prompts_give_no_groups() -> None:
    assert make_engine(tiny_model()).generate([], Sampling(num_samples=4, max_response_length=8)) == []


def test_groups_come_in_order_and_are_reported_once_when_complete() -> None:
    model = tiny_model()
    prompts = make_prompts(4, 90, 12, 2, 33)
    reported: list[tuple[int, Group]] = []
    groups = make_engine(model, stop_token_ids=[1, 2, 3, 4], max_num_seqs=6).generate(
        prompts, Sampling(num_samples=3, max_response_length=25), on_group=lambda i, group: reported.append((i, group))
    )
    assert [group.prompt.uid for group in groups] == [prompt.uid for prompt in prompts]
    assert sorted(i for i, _ in reported) == [0, 1, 2, 3, 4]
    assert all(group is groups[i] for i, group in reported)
    assert all(len(group.responses) == 3 for group in groups)


def test_the_callback_runs_while_other_groups_are_still_being_sampled() -> None:
    model = tiny_model()
    calls_at_report: list[int] = []
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    model.model.register_forward_hook(count)  # type: ignore[union-attr]
    make_engine(model, max_num_seqs=2).generate(
        make_prompts(5, 5),
        Sampling(num_samples=2, max_response_length=6),
        on_group=lambda *_: calls_at_report.append(calls),
    )
    assert calls_at_report == [6, 12]


def test_the_cache_stays_within_its_budget() -> None:
    """Bytes of the tensors that every decode step really holds; the tightest budget samples one response at a time."""
    model = tiny_model()
    held: list[int] = []

    def measure(_module: object, _args: object, options: dict[str, Any]) -> None:
        if isinstance(plan := options.get("plan"), DecodePlan):
            caches = [
                cache
                for wave in plan.waves
                for cache in (*wave.prompt_keys, *wave.prompt_values, *wave.keys, *wave.values)
            ]
            held.append(sum(cache.numel() * cache.element_size() for cache in caches))

    model.model.register_forward_pre_hook(measure, with_kwargs=True)  # type: ignore[union-attr]
    prompts = make_prompts(100, 7, 95)
    sampling = Sampling(num_samples=3, max_response_length=40)
    roomy = make_engine(model, stop_token_ids=[4, 5]).generate(prompts, sampling)
    for tokens in (100 + 40, 100 + 2 * 40, 400):
        held.clear()
        budget = tokens * token_bytes(model)
        tight = make_engine(model, stop_token_ids=[4, 5], kv_cache_bytes=budget).generate(prompts, sampling)
        assert [r.token_ids for g in tight for r in g.responses] == [r.token_ids for g in roomy for r in g.responses]
        assert budget / 2 < max(held) <= budget


def test_a_prompt_that_cannot_fit_is_refused_with_the_numbers() -> None:
    model = tiny_model()
    budget = (40 + 16) * token_bytes(model) - 1
    with pytest.raises(ValueError, match=rf"kv_cache_bytes is {budget}.*prompt 11 \(40 tokens\).*needs {budget + 1}"):
        make_engine(model, kv_cache_bytes=budget).generate(
            make_prompts(7, 40), Sampling(num_samples=1, max_response_length=16)
        )


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt 4 has no tokens"):
        make_engine(tiny_model()).generate([Prompt(4, [], "")], Sampling(num_samples=1, max_response_length=4))


def test_a_model_with_other_attention_is_refused() -> None:
    model = tiny_model()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="set_attn_implementation"):
        NativeEngine(model, stop_token_ids=[], decode=str, max_num_seqs=1, kv_cache_bytes=1 << 20)


def test_training_mode_and_gradients_survive_generation() -> None:
    model = tiny_model().train()
    engine = make_engine(model)
    engine.generate(make_prompts(5), Sampling(num_samples=2, max_response_length=3))
    assert model.training
    assert model.model.layers[0].training  # type: ignore[union-attr]
    model.set_attn_implementation("sdpa")
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_new_weights_and_version_take_effect() -> None:
    model = tiny_model()
    engine = make_engine(model)
    sampling = Sampling(num_samples=2, max_response_length=6)
    before = engine.generate(make_prompts(5), sampling)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.7)
    engine.load_weights(iter(()), version=3)
    after = engine.generate(make_prompts(5), sampling)[0]
    assert [r.policy_version for r in before.responses + after.responses] == [0, 0, 3, 3]
    for reference, response in zip(reference_logprobs(model, after), after.responses, strict=True):
        torch.testing.assert_close(torch.tensor(response.logprobs), reference, atol=1e-4, rtol=0)


def test_bfloat16_stays_close_to_a_plain_bfloat16_forward() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    group = make_engine(model).generate(make_prompts(30), Sampling(num_samples=6, max_response_length=20))[0]
    gaps = torch.cat(
        [
            (reference - torch.tensor(response.logprobs)).abs()
            for reference, response in zip(reference_logprobs(model, group), group.responses, strict=True)
        ]
    )
    assert gaps.mean() < 0.1
