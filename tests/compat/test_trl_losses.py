"""TRL's own GRPO trainer as an independent implementation of losses, gradients and advantages, on random cases.

The trainer is built once around a two-layer model; its log-probabilities and entropies are replaced by random ones, so
that `_compute_loss` works on known numbers. Its rewards are replaced by random ones for the advantages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from covey.algorithm.advantages import ADVANTAGES, gdpo
from covey.algorithm.aggregation import token_weights
from covey.algorithm.correction import high_entropy_tokens
from covey.algorithm.losses import LOSSES, LossOptions
from covey.algorithm.objective import Objective, Tokens, token_objective

trl = pytest.importorskip("trl", reason="TRL is not installed")

MAX_RESPONSE_LENGTH = 9
# TRL's loss_type: (our loss, aggregation)
TRL_LOSSES = {
    "grpo": ("grpo", "sequence_mean"),
    "dr_grpo": ("grpo", "constant"),
    "dapo": ("grpo", "token_mean"),
    "luspo": ("grpo", "sequence_sum"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "sequence_mean"),
    "vespo": ("vespo", "token_mean"),
}
few = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@dataclass(frozen=True)
class Batch:
    """Random responses, padded as TRL wants them; row b counts in the loss where mask is 1."""

    new: Tensor  # (B, L)
    old: Tensor
    ref: Tensor
    rollout: Tensor
    entropy: Tensor
    mask: Tensor  # (B, L); a row of zeros is a masked truncated response
    advantages: Tensor  # (B,)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    lengths = draw(st.lists(st.integers(1, MAX_RESPONSE_LENGTH), min_size=1, max_size=6))
    masked = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.01, 0.2, 1.0]))
    shape = (len(lengths), max(lengths))

    def noise() -> Tensor:
        return torch.randn(shape, generator=generator)

    old = -noise().abs() - 0.05
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).int()
    mask *= ~torch.tensor(masked)[:, None] if not all(masked) else 1
    advantages = torch.randn(len(lengths), generator=generator) * torch.randint(
        0, 4, (len(lengths),), generator=generator
    )
    return Batch(
        new=old + scale * noise(),
        old=old,
        ref=old + scale * noise(),
        rollout=old + 0.3 * scale * noise(),
        entropy=noise().abs(),
        mask=mask,
        advantages=advantages,
    )


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Settings under TRL's names."""
    return {
        "epsilon": draw(st.sampled_from([0.1, 0.2])),
        "epsilon_high": draw(st.sampled_from([0.2, 0.28])),
        "delta": draw(st.sampled_from([None, 1.5, 4.0])),
        "beta": draw(st.sampled_from([0.0, 0.04])),
        "use_bias_correction_kl": draw(st.booleans()),
        "importance_sampling_level": draw(st.sampled_from(["token", "sequence"])),
        "off_policy_mask_threshold": draw(st.sampled_from([None, 0.05])),
        # never exactly at a token: there the rounding inside torch.quantile decides
        "top_entropy_quantile": draw(st.sampled_from([1.0, 0.41])),
        "entropy_coef": draw(st.sampled_from([0.0, 0.05])),
        "correction": draw(
            st.sampled_from([None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
        ),
        "correction_max": draw(st.sampled_from([1.1, 3.0])),
        "correction_min": draw(st.sampled_from([None, 0.9])),
    }


@pytest.mark.parametrize("loss_type", TRL_LOSSES)
@few
@given(batch=batches(), chosen=options())
def test_loss_and_gradient_equal_trl(trainer: Any, loss_type: str, batch: Batch, chosen: dict[str, Any]) -> None:
    if loss_type == "vespo":  # its weight is the rollout correction in TRL, and its ratio is always per token
        chosen |= {"correction": None, "importance_sampling_level": "token"}
    if loss_type == "cispo":
        chosen |= {"epsilon_high": 1 + chosen["epsilon_high"]}
    if TRL_LOSSES[loss_type][1] != "token_mean" or chosen["top_entropy_quantile"] < 1:
        chosen |= {"entropy_coef": 0.0}  # there TRL's entropy has another denominator, see objective.py
    ours, our_gradient = our_loss(loss_type, batch, chosen)
    theirs, their_gradient = trl_loss(trainer, loss_type, batch, chosen)
    size = max(1.0, abs(theirs))
    assert abs(ours - theirs) <= 1e-6 * size
    assert (our_gradient - their_gradient).norm() <= 1e-5 * max(their_gradient.norm().item(), 1e-6)


def our_loss(loss_type: str, batch: Batch, chosen: dict[str, Any]) -> tuple[float, Tensor]:
    """Loss and gradient (B, L) from unpadded tokens."""
    loss, aggregation = TRL_LOSSES[loss_type]
    new = batch.new.clone().requires_grad_()
    rows, columns = torch.nonzero(batch.mask, as_tuple=True)
    lengths = batch.mask.sum(1)
    low, high = (1.0, chosen["epsilon_high"] - 1) if loss == "cispo" else (chosen["epsilon"], chosen["epsilon_high"])
    objective = Objective(
        loss=LOSSES[loss],
        options=LossOptions(
            clip_low=low,
            clip_high=high,
            dual_clip=chosen["delta"],
            sequence_ratio=chosen["importance_sampling_level"] == "sequence",
        ),
        kl_coef=chosen["beta"],
        kl_importance_weighted=chosen["use_bias_correction_kl"],
        entropy_coef=chosen["entropy_coef"],
        rollout_correction=chosen["correction"],
        rollout_ratio_low=chosen["correction_min"],
        rollout_ratio_high=chosen["correction_max"],
        off_policy_max_kl=chosen["off_policy_mask_threshold"],
    )
    picked = {name: getattr(batch, name)[rows, columns] for name in ("entropy", "old", "ref", "rollout")}
    tokens = Tokens(
        logprobs=new[rows, columns],
        entropy=picked["entropy"],
        old_logprobs=picked["old"],
        rollout_logprobs=picked["rollout"],
        ref_logprobs=picked["ref"],
        advantages=batch.advantages[rows],
        response_index=rows,
        num_responses=len(lengths),
        keep=high_entropy_tokens(picked["entropy"], share=chosen["top_entropy_quantile"]),
    )
    weights = token_weights(
        lengths.numpy(),
        (lengths > 0).numpy(),
        aggregation,
        num_responses=len(lengths),
        max_response_length=MAX_RESPONSE_LENGTH,
    )
    total = (token_objective(tokens, objective).total * torch.tensor(weights, dtype=torch.float32)[rows]).sum()
    (gradient,) = torch.autograd.grad(total, new)
    return total.item(), gradient


def trl_loss(trainer: Any, loss_type: str, batch: Batch, chosen: dict[str, Any]) -> tuple[float, Tensor]:
    """Loss and gradient (B, L) from TRL's `_compute_loss`."""
    new = batch.new.clone().requires_grad_()
    configure(trainer, loss_type, chosen)
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (new, batch.entropy, None)
    shape = batch.mask.shape
    inputs = {
        "prompt_ids": torch.ones(shape[0], 1, dtype=torch.int64),
        "prompt_mask": torch.ones(shape[0], 1, dtype=torch.int64),
        "completion_ids": torch.ones(shape, dtype=torch.int64),
        "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "num_items_in_batch": batch.mask.sum(),
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.ref,
        "sampling_per_token_logps": batch.rollout,
        "importance_sampling_ratio": correction(batch, chosen),
    }
    total = trainer._compute_loss(trainer.model, inputs)
    (gradient,) = torch.autograd.grad(total, new)
    return total.item(), gradient


def configure(trainer: Any, loss_type: str, chosen: dict[str, Any]) -> None:
    trainer.loss_type = loss_type
    trainer.beta = chosen["beta"]
    trainer.epsilon_low, trainer.epsilon_high = chosen["epsilon"], chosen["epsilon_high"]
    trainer.importance_sampling_level = chosen["importance_sampling_level"]
    trainer.off_policy_mask_threshold = chosen["off_policy_mask_threshold"]
    trainer.top_entropy_quantile = chosen["top_entropy_quantile"]
    trainer.entropy_coef = chosen["entropy_coef"]
    trainer._entropy_bonus_enabled = bool(chosen["entropy_coef"])
    trainer.use_vllm = chosen["correction"] is not None
    trainer.args.delta = chosen["delta"]
    trainer.args.use_bias_correction_kl = chosen["use_bias_correction_kl"]
    trainer.current_gradient_accumulation_steps = 1


def correction(batch: Batch, chosen: dict[str, Any]) -> Tensor:
    """TRL computes this weight while it samples, from vLLM's numbers; the formula is that of its documentation."""
    if chosen["correction"] is None:
        return torch.ones_like(batch.old)
    level, action = chosen["correction"].split("_")
    log_ratio = (batch.old - batch.rollout) * batch.mask
    ratio = torch.exp(log_ratio.sum(-1, keepdim=True) if level == "sequence" else log_ratio)
    low, high = chosen["correction_min"] or 0.0, chosen["correction_max"]
    if action == "truncate":
        return ratio.clamp(low, high)
    return ratio * ((ratio >= low) & (ratio <= high))


@few
@given(seed=st.integers(0, 2**31), group_size=st.integers(2, 5), missing=st.sampled_from([0.0, 0.3, 0.8]))
@pytest.mark.parametrize("kind", ["group", "batch", "none", "normalize_then_sum"])
def test_advantages_equal_trl(trainer: Any, kind: str, seed: int, group_size: int, missing: float) -> None:
    random = np.random.default_rng(seed)
    parts = random.integers(0, 4, (3, group_size, 2)) / 3.0
    parts[random.random(parts.shape) < missing] = np.nan
    weights = np.array([1.0, 0.5])
    if kind == "normalize_then_sum":
        ours = gdpo(parts, weights=weights, eps=1e-4)
    else:
        rewards = np.where(np.isnan(parts).all(2), np.nan, np.nansum(parts * weights, axis=2))
        name = {"group": "group_norm", "batch": "batch_std", "none": "group_center"}[kind]
        ours = ADVANTAGES[name](rewards, eps=1e-4)
    assert ours.ravel() == pytest.approx(trl_advantages(trainer, kind, parts, weights), abs=2e-3)


def trl_advantages(trainer: Any, kind: str, parts: np.ndarray, weights: np.ndarray) -> list[float]:
    trainer.model.train()
    trainer.num_generations = parts.shape[1]
    trainer.multi_objective_aggregation = kind if kind == "normalize_then_sum" else "sum_then_normalize"
    trainer.scale_rewards = kind
    trainer.reward_weights = torch.tensor(weights, dtype=torch.float32)
    flat = torch.tensor(parts.reshape(-1, 2), dtype=torch.float32)
    trainer._generate_single_turn = lambda ids, *args, **kwargs: ([[5, 6] for _ in ids], None)
    trainer._calculate_rewards = lambda *args, **kwargs: flat
    trainer.beta = 0.0
    trainer.use_vllm = False
    out = trainer._generate_and_score_completions([{"prompt": "a"} for _ in range(len(flat))])
    return out["advantages"].tolist()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A GRPOTrainer around a two-layer model, in fp32 on the CPU."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefgh"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(vocabulary),
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )
    model.config._name_or_path = "tiny"
    config = trl.GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=MAX_RESPONSE_LENGTH,
        steps_per_generation=1,
    )
    made = trl.GRPOTrainer(
        model=model,
        reward_funcs=[lambda completions, **kwargs: [0.0] * len(completions)] * 2,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a b"}] * 4),
        processing_class=tokenizer,
    )
    made.model.train()
    return made
