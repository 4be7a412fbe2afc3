"""Layers spread over ranks: the gradient of one process, the same weights after steps, the same tokens sampled."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.distributed import cases
from tests.distributed.harness import run

from covey.config.schema import AlgorithmConfig
from covey.distributed import mesh as meshes
from covey.optim import Optimizer
from covey.policy import Policy
from covey.rollout.engine import Sampling
from covey.rollout.native import NativeEngine
from covey.types import Prompt

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


@pytest.mark.slow
def test_pipelines_combine_with_every_other_axis() -> None:
    _check_gradients(
        4,
        [
            ("qwen2", ({"pp": 2, "dp_shard": 2}, {})),
            ("qwen3", ({"pp": 2, "dp_shard": 2}, {"pp_chunks": 2})),
            ("llama", ({"pp": 2, "dp_replicate": 2}, {})),
            ("qwen2", ({"pp": 4}, {})),
            ("llama", ({"pp": 4}, {"pp_layers": [1, 1, 2, 1]})),
            ("qwen2", ({"pp": 2, "tp": 2}, {"sequence_parallel": True, "pp_chunks": 2})),
            ("qwen3", ({"pp": 2, "tp": 2}, {})),
            ("llama", ({"pp": 2, "cp": 2}, {})),
        ],
    )


def _train_and_sample(layouts: list[tuple[str, Layout]]) -> list[dict[str, Any]]:
    """After two updates of four optimizer steps: this rank's trained names, all weights, norms, sampled tokens."""
    found = []
    for family, layout in layouts:
        policy = _policy(family, layout)
        parameters = list(policy.model.parameters())
        norm = {} if policy.mesh.world == 1 else {"norm": policy.parallel.gradient_norm(parameters)}
        optimizer = Optimizer(parameters, cases.train_config(), **norm)
        norms = []
        for _ in range(2):
            algorithm = AlgorithmConfig(epochs=2, mini_batch_size=2)
            stats = policy.update(
                cases.batch(), algorithm, optimizer=optimizer, lr=lambda i: 1e-3, max_response_length=32
            )
            norms.append(stats.values["actor/grad_norm"])
        with policy.gathered():
            engine = NativeEngine(
                policy.model,
                stop_token_ids=[3],
                decode=str,
                max_num_seqs=8,
                kv_cache_bytes=2**24,
                tp_size=policy.mesh.tp,
            )
            prompts = [Prompt(i, [5 + i, 7, 11, 13 + i][: 2 + i], "") for i in range(3)]
            groups = engine.generate(prompts, Sampling(num_samples=4, max_response_length=10, seed=3))
        again = policy.logprobs(cases.batch().groups)  # training goes on after a rollout
        found.append(
            {
                "names": [name for name, _ in policy.model.named_parameters()],
                "weights": {name: tensor.clone() for name, tensor in policy.weights()},
                "norms": norms,
                "tokens": [[response.token_ids for response in group.responses] for group in groups],
                "logprobs": again,
            }
        )
    meshes.stop()
    return found


def _check_training(world: int, layouts: list[tuple[str, Layout]]) -> list[list[dict[str, Any]]]:
    (expected,) = run(1, _train_and_sample, [(family, ({}, {})) for family, _ in layouts])
    ranks = run(world, _train_and_sample, layouts)
    for i, one in enumerate(expected):
        for rank in ranks:
            assert rank[i]["norms"] == pytest.approx(one["norms"], rel=1e-5)
            assert rank[i]["tokens"] == one["tokens"]
            assert cases.relative(rank[i]["weights"], one["weights"]) < 1e-5
            assert all(torch.equal(rank[i]["weights"][n], ranks[0][i]["weights"][n]) for n in one["weights"])
            torch.testing.assert_close(rank[i]["logprobs"], one["logprobs"], rtol=0, atol=1e-4)
    return ranks


def test_steps_end_in_the_weights_of_one_process_and_sample_its_tokens() -> None:
    ranks = _check_training(2, [("qwen2", PLAIN), ("llama", UNEVEN_INTERLEAVED)])
    first, last = ranks[0][0]["names"], ranks[1][0]["names"]
    assert set(first) & set(last) == {"model.embed_tokens.weight"}  # tied to the head
    assert [name for name in last if "layers.0." in name or "layers.2." in name] == []
    assert "model.norm.weight" in last
    assert "model.norm.weight" not in first
    first, last = ranks[0][1]["names"], ranks[1][1]["names"]
    assert set(first) & set(last) == set()
    assert {int(name.split(".")[2]) for name in first if ".layers." in name} == {0, 3}


@pytest.mark.slow
def test_steps_of_pipelines_with_sharded_or_cut_stages() -> None:
    sharded = ({"pp": 2, "dp_shard": 2}, {})
    cut = ({"pp": 2, "tp": 2}, {"pp_chunks": 2, "sequence_parallel": True})
    _check_training(4, [("qwen2", sharded), ("qwen3", cut)])


def _other_passes(layout: Layout) -> list[dict[str, Any]]:
    """Demonstrations; then an update with recomputed activations and only the tokens of highest entropy."""
    sizes, options = layout
    m = meshes.start(communication="gloo", device=cases.CPU, **sizes)
    network = cases.model("qwen2", num_layers=NUM_LAYERS)
    network.gradient_checkpointing_enable({"use_reentrant": False})
    policy = cases.policy_of(network, m, **options)
    recorder = cases.Recorder(policy)
    step = cases.batch()
    found = policy.imitate(step.groups, optimizer=recorder, lr=1e-3)
    demonstrations = {"gradients": recorder.gradients, "stats": found}
    update = cases.measure(policy, {"loss": "grpo", "top_entropy_share": 0.5})
    meshes.stop()
    return [demonstrations, update]


def test_demonstrations_recomputed_activations_and_chosen_tokens_are_those_of_one_process() -> None:
    (expected,) = run(1, _other_passes, ({}, {}))
    ranks = run(2, _other_passes, INTERLEAVED)
    for i, one in enumerate(expected):
        together = ranks[0][i]["gradients"] | ranks[1][i]["gradients"]
        assert cases.relative(together, one["gradients"]) < 1e-5
        for rank in ranks:
            for name, value in one["stats"].items():
                assert rank[i]["stats"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def _bf16(sizes: dict[str, Any]) -> dict[str, Any]:
    m = meshes.start(communication="gloo", device=cases.CPU, **sizes)
    policy = cases.policy_of(cases.model("qwen2", num_layers=NUM_LAYERS), m, compute_dtype=torch.bfloat16)
    held = {p.dtype for p in policy.model.parameters()}
    with policy.gathered():
        gathered = {p.dtype for p in policy.model.parameters()}
        num_gathered = sum(p.numel() for p in policy.model.parameters())
    step, recorder = cases.batch(), cases.Recorder(policy)
    step.old_logprobs = None  # ratios of 1: rounding must not decide which tokens are clipped
    policy.update(step, AlgorithmConfig(), optimizer=recorder, lr=lambda i: 1e-3, max_response_length=32)
    meshes.stop()
    return {"held": held, "gathered": gathered, "size": num_gathered, "gradients": recorder.gradients}


def test_bf16_stages_keep_fp32_masters_and_gradients() -> None:
    ranks = run(2, _bf16, {"pp": 2})
    whole = sum(p.numel() for p in cases.model("qwen2", num_layers=NUM_LAYERS).parameters())
    for rank in ranks:
        assert (rank["held"], rank["gathered"], rank["size"]) == ({torch.float32}, {torch.bfloat16}, whole)
        assert {g.dtype for g in rank["gradients"].values()} == {torch.float32}
    (data_parallel, _) = run(2, _bf16, {})
    together = ranks[0]["gradients"] | ranks[1]["gradients"]
    assert cases.relative(together, data_parallel["gradients"]) < 0.05


def _refused(sizes: dict[str, Any], options: dict[str, Any]) -> str:
    m = meshes.start(communication="gloo", device=cases.CPU, **sizes)
    with pytest.raises(ValueError) as caught:
        cases.policy_of(cases.model("llama"), m, **options)
    return str(caught.value)


def test_more_pieces_than_layers_are_refused_with_the_numbers() -> None:
    for message in run(2, _refused, {"pp": 2}, {"pp_chunks": 2}):
        assert "pp=2 x pp_chunks=2 = 4 pieces" in message
        assert "2 layers" in message
