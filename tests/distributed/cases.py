"""Small models and a real packed GRPO batch that every test of this folder trains on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from covey.algorithm.advantages import ADVANTAGES
from covey.config.schema import AlgorithmConfig, TrainConfig
from covey.distributed import mesh as meshes
from covey.distributed.fsdp import local_tensor
from covey.models.load import prepare_model
from covey.optim import Optimizer
from covey.policy import ForwardLimits, Policy
from covey.types import Group, Prompt, Response, StepBatch

CPU = torch.device("cpu")
VOCAB = 97  # divides by no number of ranks
FAMILIES = ("qwen2", "qwen3", "llama")


def model(family: str, *, kv_heads: int = 2, num_layers: int = 2) -> Any:
    """Few layers; qwen2 with tied embeddings; norms and biases away from 1 and 0, which would hide a dropped one."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": family == "qwen2",
    }
    torch.manual_seed(0)
    if family == "qwen2":
        network = Qwen2ForCausalLM(Qwen2Config(**sizes))
    elif family == "qwen3":
        network = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16))
    else:
        network = LlamaForCausalLM(LlamaConfig(**sizes))
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embed" not in name:
                parameter.mul_(2.0)
    prepare_model(network)
    return network


def batch(num_prompts: int = 4, num_samples: int = 3) -> StepBatch:
    """Groups of unequal lengths; the step has old and reference log-probabilities, so ratios are not 1."""
    rng = np.random.default_rng(1)
    groups = []
    for p in range(num_prompts):
        prompt = Prompt(p, rng.integers(0, VOCAB, rng.integers(1, 12)).tolist(), "")
        lengths = rng.integers(1, 24, num_samples)
        groups.append(Group(prompt, [Response(rng.integers(0, VOCAB, n).tolist(), [-4.6] * n) for n in lengths]))
    rewards = rng.normal(size=(num_prompts, num_samples))
    num_tokens = sum(len(r.token_ids) for g in groups for r in g.responses)
    noise = torch.from_numpy(rng.normal(size=(2, num_tokens))).float()
    return StepBatch(
        groups,
        rewards,
        ADVANTAGES["group_norm"](rewards, eps=1e-6),
        old_logprobs=-4.6 + 0.1 * noise[0],
        ref_logprobs=-4.6 + 0.1 * noise[1],
    )


class Recorder:
    """In the optimizer's place: keeps the whole gradient instead of stepping."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.gradients: dict[str, torch.Tensor] = {}
        self.norm = 0.0

    def step(self, lr: float) -> float:
        trained = {name: p for name, p in self.policy.model.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():
            assert parameter.grad is not None, name
            self.gradients[name] = parameter.grad
        if self.policy.mesh.world > 1:  # sums what tensor-parallel ranks hold shares of
            parameters = list(trained.values())
            norm = self.policy.parallel.gradient_norm(parameters)
            self.norm = float(norm([local_tensor(p.grad) for p in parameters if p.grad is not None]))
        for name, parameter in trained.items():
            self.gradients[name] = self.policy.parallel.whole(name, self.gradients[name]).clone()
            parameter.grad = None
        return 1.0


def make_policy(family: str, sizes: dict[str, Any], **options: Any) -> Policy:
    """A policy over the processes of this run."""
    return policy_of(model(family), meshes.start(communication="gloo", device=CPU, **sizes), **options)


def policy_of(network: Any, m: meshes.Mesh, *, max_tokens: int = 60, **options: Any) -> Policy:
    limits = ForwardLimits(max_tokens_per_micro_batch=max_tokens, logits_chunk_bytes=4 * VOCAB * 7)
    return Policy(network, device=CPU, temperature=0.8, limits=limits, mesh=m, **options)


def gradient(family: str, sizes: dict[str, Any], algorithm: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The whole gradient of one optimizer step, its statistics, and log-probabilities without gradient."""
    found = measure(make_policy(family, sizes, **options), algorithm)
    meshes.stop()
    return found


def measure(policy: Policy, algorithm: dict[str, Any]) -> dict[str, Any]:
    """`gradient` of a policy, whose processes go on."""
    step = batch()
    recorder = Recorder(policy)
    config = AlgorithmConfig(kl_coef=0.1, entropy_coef=0.01, **algorithm)
    before = policy.logprobs(step.groups)
    stats = policy.update(step, config, optimizer=recorder, lr=lambda i: 1e-3, max_response_length=32)
    found = {"gradients": recorder.gradients, "stats": stats.values, "logprobs": before, "norm": recorder.norm}
    return found | {"loss": stats.values["actor/loss"]}


def two_steps(family: str, sizes: dict[str, Any], options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Weights and gradient norms after two updates of four optimizer steps."""
    policy = make_policy(family, sizes, **(options or {}))
    parameters = list(policy.model.parameters())
    norm = {} if policy.mesh.world == 1 else {"norm": policy.parallel.gradient_norm(parameters)}
    optimizer = Optimizer(parameters, train_config(), **norm)
    norms = []
    for _ in range(2):
        stats = policy.update(
            batch(),
            AlgorithmConfig(epochs=2, mini_batch_size=2),
            optimizer=optimizer,
            lr=lambda i: 1e-3,
            max_response_length=32,
        )
        norms.append(stats.values["actor/grad_norm"])
    weights = {name: tensor.clone() for name, tensor in policy.weights()}
    meshes.stop()
    return {"weights": weights, "norms": norms}


def train_config() -> TrainConfig:
    return TrainConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5)


def relative(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """|actual - expected| / |expected| over the whole gradient."""
    assert actual.keys() == expected.keys()
    difference = sum(float((actual[n] - expected[n]).double().square().sum()) for n in expected)
    size = sum(float(g.double().square().sum()) for g in expected.values())
    return (difference / size) ** 0.5
