"""From a configuration to the parts of a run: device, tokenizer, model, stop ids, engine, prompts.

Every command that needs them builds them here, in the same order and with the same checks.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from covey import device as devices
from covey.config.environment import DEBUG_ENVIRONMENT
from covey.config.lora import LoraConfig
from covey.config.schema import Config, ModelConfig, ParallelConfig, TrainConfig
from covey.data import load as prompt_data
from covey.data.prompts import PromptSet, count_shared, split_prompts
from covey.distributed import mesh as meshes
from covey.distributed.mesh import Mesh
from covey.models.adapters import add_adapter
from covey.models.finite import watch_gradients
from covey.models.load import check_vocabulary, kernels_of, load_model, load_tokenizer, stop_ids
from covey.optim import Optimizer, total_norm
from covey.policy import ForwardLimits, Policy
from covey.rewards.runner import Scorer
from covey.rollout.engine import RolloutEngine, Sampling
from covey.rollout.native import NativeEngine
from covey.rollout.reward_model import local_rewards
from covey.rollout.shared import SharedEngine

log = logging.getLogger(__name__)


@dataclass
class Prompts:
    """Rows to train on and rows to evaluate on; disjoint."""

    train: PromptSet
    eval: PromptSet | None


@dataclass
class Parts:
    """What is loaded once per process."""

    device: devices.Device
    tokenizer: Any
    policy: Policy
    mesh: Mesh
    kernels: dict[str, str]  # what runs attention, norms, rotary embedding, SwiGLU
    debug: bool = False  # faults are looked for

    def describe(self) -> dict[str, str]:
        """Device and kernels, for the start-up table and the run's records."""
        return self.device.describe() | self.kernels


def load_parts(
    model: ModelConfig,
    train: TrainConfig,
    parallel: ParallelConfig | None = None,
    *,
    kind: str,
    temperature: float,
    sampling_consistent: bool = False,
    lora: LoraConfig | None = None,
    seed: int = 0,
    debug: bool = False,
    deterministic: bool = False,
) -> Parts:
    """Device, tokenizer and model, checked against each other and shared by the ranks of `parallel`.

    seed: of the random part of a new adapter. debug: look for faults while running (docs/replay.md), slowly.
    deterministic: refuse kernels whose result varies from run to run.
    """
    disable_progress_bar()  # transformers' own, for files that load in a moment
    if debug:
        _start_debugging()
    if deterministic:
        devices.make_deterministic()
    device = devices.resolve(kind, model.dtype, meshes.local_rank())
    parallel = parallel or ParallelConfig()
    mesh = meshes.start(
        communication=device.communication,
        device=device.torch_device,
        dp_replicate=parallel.dp_replicate,
        dp_shard=parallel.dp_shard,
        cp=parallel.cp,
        tp=parallel.tp,
        pp=parallel.pp,
        timeout_s=parallel.timeout_s,
        debug=debug,
    )
    tokenizer = load_tokenizer(model.tokenizer or model.path, trust_remote_code=model.trust_remote_code)
    network = _load_network(model, lora, device, sharded=mesh.world > 1, seed=seed)
    check_vocabulary(network, tokenizer)
    if model.gradient_checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    limits = ForwardLimits(train.max_tokens_per_micro_batch, train.logits_chunk_bytes)
    policy = Policy(
        network,
        device=device.torch_device,
        temperature=temperature,
        limits=limits,
        mesh=mesh,
        compute_dtype=device.dtype,
        sequence_parallel=parallel.sequence_parallel,
        pp_chunks=parallel.pp_chunks,
        pp_layers=parallel.pp_layers,
        reduce_every_micro_batch=parallel.reduce_every_micro_batch,
        sampling_consistent=sampling_consistent,
    )
    if debug:
        policy.parallel.watch()
    return Parts(device, tokenizer, policy, mesh, kernels_of(network), debug=debug)


def _load_network(
    model: ModelConfig, lora: LoraConfig | None, device: devices.Device, *, sharded: bool, seed: int
) -> Any:
    trained = torch.float32 if sharded else device.dtype  # pieces are fp32 masters
    network = load_model(
        model.path,
        dtype=trained if lora is None else device.dtype,
        device=device.torch_device,
        compute_dtype=device.dtype,
        reference_kernels=model.kernels == "reference",
        trust_remote_code=model.trust_remote_code,
        fill_later=sharded,
    )
    if lora is not None:
        attach_adapter(network, lora, model, seed=seed, dtype=trained, device=device.torch_device)
    return network


def _start_debugging() -> None:
    """Launches one after another, and backward's faults with the forward that caused them."""
    os.environ |= DEBUG_ENVIRONMENT  # on the command line set before torch was imported (commands/options.py)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow
        torch.autograd.set_detect_anomaly(True)


def load_run_parts(config: Config) -> Parts:
    """`load_parts` of a training run."""
    return load_parts(
        config.model,
        config.train,
        config.parallel,
        kind=config.device,
        temperature=config.rollout.temperature,
        sampling_consistent=config.algorithm.sampling_consistent,
        lora=config.lora,
        seed=config.seed,
        debug=config.debug,
        deterministic=config.deterministic,
    )


def attach_adapter(
    network: Any,
    lora: LoraConfig,
    model: ModelConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> None:
    """Freeze the weights of `network`, those of `model`, and add the adapter that section `lora` describes.

    device: of the adapter; None: the weights' own.
    """
    add_adapter(
        network,
        base=model.path,
        rank=lora.rank,
        alpha=lora.alpha,
        targets=lora.target_modules,
        path=lora.path,
        seed=seed,
        dtype=dtype,
        device=device,
    )


def make_optimizer(parts: Parts, train: TrainConfig) -> Optimizer:
    """AdamW over the policy's weights, or over this rank's pieces of them."""
    named = [(name, p) for name, p in parts.policy.model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    norm = total_norm if parts.mesh.world == 1 else parts.policy.parallel.gradient_norm(parameters)
    if parts.debug:
        norm = watch_gradients([name for name, _ in named], norm)
    return Optimizer(parameters, train, norm=norm)


def load_prompts(config: Config, tokenizer: Any) -> Prompts:
    """Training and held-out prompts."""
    data = config.data
    train = prompt_data.load_prompts(data.train, tokenizer, data, limit=data.limit)
    held_out = None
    if data.eval is not None:
        held_out = prompt_data.load_prompts(data.eval, tokenizer, data, limit=data.eval_rows or None)
        if shared := count_shared(train, held_out):
            log.warning("%d training prompts are also held out in %s: held-out scores flatter", shared, data.eval)
    elif data.eval_rows:
        train, held_out = split_prompts(train, data.eval_rows)
    return Prompts(train, held_out)


def make_scorer(config: Config, parts: Parts) -> Scorer:
    """The reward functions; model-based ones run on the policy's device."""
    local = local_rewards(config.reward, parts.device.torch_device, parts.device.dtype)
    return Scorer(config.reward, max_response_length=config.rollout.max_response_length, local=local)


def check_tasks(scorer: Scorer, prompts: Prompts, task_key: str) -> None:
    """ValueError when a row, training or held out, has a task without reward functions."""
    for part in (prompts.train, prompts.eval):
        if part is not None and len(part):
            has_tasks = task_key in part.table.column_names
            tasks = part.table[task_key].unique().to_pylist() if has_tasks else [None]
            scorer.check_rows([{task_key: task} for task in tasks] if has_tasks else [{}])


def stop_token_ids(config: Config, parts: Parts, prompts: Prompts) -> list[int]:
    """Ids that end a response: the model's, the tokenizer's, the template's, the settings'."""
    extra = [*config.rollout.stop_token_ids, *prompts.train.stop_token_ids]
    return stop_ids(parts.policy.model, parts.tokenizer, extra=extra)


def sampling_of(config: Config, step: int) -> Sampling:
    """How the responses of a training step are sampled."""
    rollout = config.rollout
    return Sampling(
        num_samples=rollout.num_samples,
        max_response_length=rollout.max_response_length,
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        seed=config.seed,
        step=step,
    )


def made_on(parts: Parts) -> dict[str, str]:
    """What the bits of this process's results depend on besides configuration and data."""
    equal = "yes" if parts.device.deterministic else "no"
    return parts.describe() | {"processes": str(parts.mesh.world), "equal bits every time": equal}


def make_engine(config: Config, parts: Parts, prompts: Prompts) -> RolloutEngine:
    """The rollout engine, shared by the ranks."""
    with parts.policy.gathered():
        engine = _make_engine(config, parts, prompts)
    return engine if parts.mesh.world == 1 else SharedEngine(engine, parts.mesh, parts.policy.gathered)


def _make_engine(config: Config, parts: Parts, prompts: Prompts) -> RolloutEngine:
    stops = stop_token_ids(config, parts, prompts)

    def decode(ids: list[int]) -> str:
        return parts.tokenizer.decode(ids, skip_special_tokens=True)

    return NativeEngine(
        parts.policy.model,
        stop_token_ids=stops,
        decode=decode,
        max_num_seqs=config.rollout.max_num_seqs,
        tp_size=parts.mesh.tp,
        kv_cache_bytes=config.rollout.kv_cache_bytes,
    )
