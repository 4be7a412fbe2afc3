"""What the tests of this folder run in processes of their own; each registers the simulated device first."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.distributed import cases
from tests.npusim import simulator

from covey import device as devices
from covey import trainer
from covey.config.load import load_config
from covey.config.schema import AlgorithmConfig
from covey.distributed import mesh as meshes
from covey.models.fused import choose_kernels
from covey.optim import Optimizer
from covey.policy import ForwardLimits, Policy
from covey.tools import quickstart, tiny

SHORT = [
    "rollout.max_response_length=12",
    "rollout.num_samples=4",
    "train.batch_size=4",
    "train.warmup_steps=1",
    "algorithm.kl_coef=0.05",
    "evaluation.num_samples=1",
    "data.eval_rows=4",
    "checkpoint.every=1",
]


def make_quickstart(directory: Path) -> Path:
    """The quickstart's model without a cold start, its data, and its grpo.yaml."""
    tiny.make_model(directory / "start", 0)
    files = tiny.make_data(directory / "data", 0)
    values = {"seed": 0, "model": directory / "start", "output": directory / "unused", "steps": 2, "every": 2}
    values |= {"train": files.train, "eval": files.eval, "code": ""}
    return quickstart._write(directory / "grpo.yaml", quickstart._GRPO, values)


def train(kind: str, config: Path, output: Path, settings: list[str], resume: bool = False) -> dict[str, Any]:
    """A run of the YAML; its metrics without times and memory, and on npu what the device counted."""
    library = simulator.register() if kind == "npu" else None
    sets = [f"device={kind}", f"output_dir={output}", *SHORT, *settings]
    trainer.train(load_config(config, sets), resume=resume or None, quiet=True)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    untimed = [
        {k: v for k, v in line.items() if not k.startswith(("time", "timing", "memory", "e2e"))} for line in lines
    ]
    found: dict[str, Any] = {"metrics": untimed, "facts": json.loads((output / "run.json").read_text())}
    if library is not None:
        found |= {"counts": library.counts(), "fallbacks": library.fallbacks()}
    return found


def two_steps(kind: str, sizes: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """As cases.two_steps, on `kind` with its kernels: weights and gradient norms after two updates."""
    if kind == "npu":
        simulator.register()
    device = devices.resolve(kind, "float32", meshes.local_rank())
    network = cases.model("qwen3").to(device.torch_device)
    choose_kernels(network, device=device.torch_device, dtype=torch.float32)
    mesh = meshes.start(communication=device.communication, device=device.torch_device, **sizes)
    limits = ForwardLimits(max_tokens_per_micro_batch=60, logits_chunk_bytes=4 * cases.VOCAB * 7)
    policy = Policy(network, device=device.torch_device, temperature=0.8, limits=limits, mesh=mesh, **options)
    parameters = list(policy.model.parameters())
    norm = {} if mesh.world == 1 else {"norm": policy.parallel.gradient_norm(parameters)}
    optimizer = Optimizer(parameters, cases.train_config(), **norm)
    norms = []
    for _ in range(2):
        step = cases.batch()
        step.old_logprobs, step.ref_logprobs = (
            x if x is None else x.to(device.torch_device) for x in (step.old_logprobs, step.ref_logprobs)
        )
        stats = policy.update(
            step,
            AlgorithmConfig(epochs=2, mini_batch_size=2, kl_coef=0.1),
            optimizer=optimizer,
            lr=lambda i: 3e-4,
            max_response_length=32,
        )
        norms.append(stats.values["actor/grad_norm"])
    weights = {name: tensor.cpu().clone() for name, tensor in policy.weights()}
    backend = dist.get_backend() if mesh.world > 1 else ""
    meshes.stop()
    return {"weights": weights, "norms": norms, "backend": backend}


def refusals() -> dict[str, str]:
    """First lines of the errors of mistakes that a CPU would let pass."""
    simulator.register()
    x = torch.ones(3, 4, device="npu")

    def topk() -> Any:
        return x.topk(2, sorted=False)

    attempts = {
        "operand on the host": lambda: x.index_select(0, torch.tensor([0, 1])),
        "sum with the host": lambda: torch.cat([x, torch.ones(3, 4)]),
        "fp64": lambda: x.double().sum(),
        "fp64 by dtype": lambda: x.sum(dtype=torch.float64),
        "boolean index": lambda: x[x > 0],
        "assignment by index": lambda: x.__setitem__(torch.tensor([0], device="npu"), 1.0),
        "bfloat16 cumsum": lambda: x.bfloat16().cumsum(0),
        "int64 sort": lambda: x.long().sort(),
        "unsorted topk": topk,
    }
    return {name: _first_line(attempt) for name, attempt in attempts.items()}


def collectives() -> dict[str, Any]:
    """On two ranks: results of the reductions that HCCL has, errors of those it has not."""
    library = simulator.register()
    del library
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)  # type: ignore[attr-defined]
    dist.init_process_group("cpu:gloo,npu:hccl")

    def reduced(values: list[float], dtype: torch.dtype, op: Any) -> Any:
        x = (torch.tensor(values, dtype=dtype) * (rank + 1)).to("npu")
        dist.all_reduce(x, op=op)
        return x.tolist()

    ops = dist.ReduceOp
    found: dict[str, Any] = {
        "sum": reduced([1.0, 2.0], torch.float32, ops.SUM),
        "average": reduced([1.0, 2.0], torch.bfloat16, ops.AVG),
        "maximum": reduced([1, 2], torch.int64, ops.MAX),
        "average of int": _first_line(lambda: reduced([1, 2], torch.int64, ops.AVG)),
        "fp64": _first_line(lambda: reduced([1.0], torch.float64, ops.SUM)),
        "bits": _first_line(lambda: reduced([1], torch.int32, ops.BOR)),
        "not contiguous": _first_line(lambda: dist.all_reduce(torch.ones(3, 2, device="npu").t())),
        "host tensor over gloo": reduced_on_host(rank),
    }
    gathered = torch.empty(4, dtype=torch.float64, device="npu")
    dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank), dtype=torch.float64).to("npu"))
    found["gathered fp64"] = gathered.cpu().tolist()
    dist.destroy_process_group()
    return found


def reduced_on_host(rank: int) -> list[float]:
    """fp64 over gloo, which Covey's statistics use."""
    x = torch.tensor([rank + 1.0], dtype=torch.float64)
    dist.all_reduce(x)
    return x.tolist()


def kernel_mistakes() -> dict[str, str]:
    """Errors of the self-test, or of the call itself, for mistakes planted in the calls of torch_npu."""
    simulator.register()
    import torch_npu  # pyright: ignore[reportMissingImports]

    from covey.models import ascend, fused
    from covey.models.kernels import fused_ops

    device = torch.device("npu:0")
    real = torch_npu.npu_fusion_attention
    real_grad = torch_npu.npu_fusion_attention_grad

    def attention(**changes: Any) -> str:
        def changed(*args: Any, **kwargs: Any) -> Any:
            kept = {k: v for k, v in (kwargs | changes).items() if v is not LEFT_OUT}
            return real(*args, **kept)

        return _attention_with(ascend, fused, device, changed, real_grad)

    def gradient(**changes: Any) -> str:
        def changed(*args: Any, **kwargs: Any) -> Any:
            kept = {k: v for k, v in (kwargs | changes).items() if v is not LEFT_OUT}
            return real_grad(*args, **kept)

        return _attention_with(ascend, fused, device, real, changed)

    found = {
        "none": attention(),
        "missing scale": attention(scale=LEFT_OUT),
        "top-left mask": attention(sparse_mode=2),
        "no mask": attention(atten_mask=None),
        "statistics by head": attention(softmax_layout=LEFT_OUT),
        "wrong keyword": attention(cu_seqlens_q=[3, 4, 9, 11]),
        "missing scale in backward": gradient(scale_value=LEFT_OUT),
        "wrong keyword in backward": gradient(scale=0.125),
    }
    op = fused_ops(device)["rms_norm"]
    wrong = fused.FusedOp(op.name, lambda x, weight, eps: torch_npu.npu_rms_norm(x, weight)[0])
    found["default epsilon"] = _first_line(lambda: fused.check_rms_norm(wrong, device, torch.float32, eps=1e-5))
    return found


LEFT_OUT = object()


def _attention_with(ascend: Any, fused: Any, device: torch.device, forward: Any, backward: Any) -> str:
    before = ascend.torch_npu.npu_fusion_attention, ascend.torch_npu.npu_fusion_attention_grad
    ascend.torch_npu.npu_fusion_attention, ascend.torch_npu.npu_fusion_attention_grad = forward, backward
    try:
        return _first_line(lambda: fused.check_attention(device, torch.float32, head_dim=64, groups=2))
    finally:
        ascend.torch_npu.npu_fusion_attention, ascend.torch_npu.npu_fusion_attention_grad = before


def many_sequences() -> dict[str, Any]:
    """More sequences than one call takes: how many calls, and the largest difference from the reference."""
    simulator.register()
    from covey.models import ascend
    from covey.models.attention import varlen_attention

    lens = [1 + i % 3 for i in range(1500)]
    parts = ascend.prepare(lens, lens, causal=True, device=torch.device("cpu")).parts
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(sum(lens), n, 8, generator=generator) for n in (2, 1, 1)]
    found = []
    for device, reference in (("npu", False), ("cpu", True)):
        mine = [x.detach().to(device).requires_grad_() for x in inputs]
        out = varlen_attention(*mine, lens_q=lens, lens_k=lens, scale=0.3, reference=reference)
        out.sum().backward()
        found.append([out.detach().cpu(), *(x.grad.cpu() for x in mine if x.grad is not None)])
    differences = [float((x - y).abs().max()) for x, y in zip(*found, strict=True)]
    return {"calls": [len(part.query_ends) for part in parts], "difference": max(differences)}


def _first_line(attempt: Any) -> str:
    """The error's first line; empty when there is none."""
    try:
        attempt()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error).splitlines()[0]
    return ""
