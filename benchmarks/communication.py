"""Bytes that each rank sends in an optimizer step, counted call by call in real runs, against the formulas.

    python benchmarks/communication.py           # 2 and 4 gloo processes, a tiny model: about 3 minutes
    python benchmarks/communication.py --small   # two layouts

Every exchange of forward, backward and optimizer passes torch's dispatcher as an operation `c10d::*`; its tensors and
group are counted as a ring would send them (covey/tools/traffic.py). The mean over ranks must be within 2 % of the
formula, by axis; else exit code 1. Exchanges below 1 % of the whole (norm, statistics) are listed as `small`.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from tests.distributed.harness import run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from covey.config.schema import AlgorithmConfig, Config, TrainConfig
from covey.distributed import mesh as meshes
from covey.models.load import prepare_model
from covey.optim import Optimizer
from covey.policy import ForwardLimits, Policy
from covey.tools.traffic import Shape, Work, update_traffic
from covey.types import Group, Prompt, Response, StepBatch

CPU = torch.device("cpu")
BOUND = 0.02
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp_shard 2": (2, {}),
    "dp_shard 2, reduce every micro-batch": (2, {"reduce_every_micro_batch": True}),
    "dp_shard 2, checkpointing": (2, {"gradient_checkpointing": True}),
    "dp_replicate 2 x dp_shard 2": (4, {"dp_replicate": 2}),
    "tp 2": (2, {"tp": 2}),
    "tp 2, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "tp 2, checkpointing": (2, {"tp": 2, "gradient_checkpointing": True}),
    "tp 2, sequence parallel, checkpointing": (
        2,
        {"tp": 2, "sequence_parallel": True, "gradient_checkpointing": True},
    ),
    "tp 2 x dp_shard 2": (4, {"tp": 2}),
    "cp 2": (2, {"cp": 2}),
    "cp 2, checkpointing": (2, {"cp": 2, "gradient_checkpointing": True}),
    "pp 2": (2, {"pp": 2}),
    "pp 2 x dp_shard 2": (4, {"pp": 2}),
}
_RING = {  # share of the counted tensor that a rank of n sends
    "allgather": lambda n: (n - 1) / n,  # of the result
    "reduce_scatter": lambda n: (n - 1) / n,  # of the input
    "allreduce": lambda n: 2 * (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
}


class Counted(TorchDispatchMode):
    """Bytes sent by (kind of exchange, group)."""

    def __init__(self, axes: dict[str, str]) -> None:
        """axes: of the groups, by their names."""
        super().__init__()
        self.sent: Counter[tuple[str, str]] = Counter()
        self._axes = axes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count it when it is an exchange."""
        if func.namespace == "c10d":
            self._count(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        kind = next((kind for kind in _RING if name.strip("_").startswith(kind)), None)
        if kind is None:
            return
        group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject) and _is_group(a))
        first = args[1] if kind == "reduce_scatter" else args[0]  # (output, input, ...): the larger one
        size = sum(t.nbytes for t in tree_leaves(first) if isinstance(t, torch.Tensor))
        self.sent[kind, self._axes.get(group.group_name, "other")] += int(size * _RING[kind](group.size()))


def _is_group(value: Any) -> bool:
    try:
        dist.ProcessGroup.unbox(value)
    except (RuntimeError, TypeError):
        return False
    return True


def measure(options: dict[str, Any]) -> tuple[Counter[tuple[str, str]], dict[str, float]]:
    """(counted, by formula) bytes of this rank in one optimizer step, after a first one."""
    warnings.simplefilter("ignore")
    axes = {key: value for key, value in options.items() if key in ("dp_replicate", "cp", "tp", "pp")}
    mesh = meshes.start(communication="gloo", device=CPU, **axes)
    policy, network = _policy(mesh, options)
    parameters = list(policy.model.parameters())
    optimizer = Optimizer(parameters, TrainConfig(), norm=policy.parallel.gradient_norm(parameters))
    batch = _batch()
    algorithm = AlgorithmConfig(kl_coef=0.0)
    with Counted(_axes(mesh)) as counted:
        for _ in range(2):
            counted.sent.clear()
            policy.update(batch, algorithm, optimizer=optimizer, lr=lambda i: 1e-6, max_response_length=64)
    micros = policy._pack(batch.groups)
    targets = sum(len(micro.target_ids) for micro in micros)
    tokens = sum(-(-micro.num_tokens // (mesh.tp * mesh.cp)) * mesh.tp * mesh.cp for micro in micros)
    work = Work(len(micros), tokens, targets)
    formula = update_traffic(_config(options), Shape.of(network), mesh, work, size=4)
    meshes.stop()
    return counted.sent, formula


def _policy(mesh: meshes.Mesh, options: dict[str, Any]) -> tuple[Policy, Any]:
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    network = Qwen2ForCausalLM(config)
    prepare_model(network)
    with torch.device("meta"):
        skeleton = Qwen2ForCausalLM(config)
    if options.get("gradient_checkpointing"):
        network.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(
        network,
        device=CPU,
        temperature=1.0,
        limits=ForwardLimits(max_tokens_per_micro_batch=256, logits_chunk_bytes=2**20),
        mesh=mesh,
        sequence_parallel=options.get("sequence_parallel", False),
        reduce_every_micro_batch=options.get("reduce_every_micro_batch", False),
    )
    return policy, skeleton


def _batch() -> StepBatch:
    import numpy as np

    rng = np.random.default_rng(0)
    groups = [
        Group(
            Prompt(p, rng.integers(0, 512, 32).tolist(), ""),
            [Response(rng.integers(0, 512, 49).tolist(), [-6.0] * 49) for _ in range(4)],
        )
        for p in range(8)
    ]
    return StepBatch(groups, np.zeros((8, 4)), rng.normal(size=(8, 4)))


def _config(options: dict[str, Any]) -> Config:
    parallel = {key: value for key, value in options.items() if key != "gradient_checkpointing"}
    return Config.model_validate(
        {
            "model": {"path": "none", "gradient_checkpointing": options.get("gradient_checkpointing", False)},
            "data": {"train": "none"},
            "reward": {"functions": ["math"]},
            "parallel": parallel,
            "output_dir": "none",
        }
    )


def _axes(mesh: meshes.Mesh) -> dict[str, str]:
    """Axes of every group by its name: one group serves several axes when they have the same ranks."""
    groups = {"fsdp": mesh.fsdp_group, "tp": mesh.tp_group, "cp": mesh.cp_group}
    groups["replicate"] = mesh.device_mesh.get_group("dp_replicate")
    found: dict[str, str] = {}
    for axis, group in groups.items():
        if group is not None and group.size() > 1:
            found[group.group_name] = f"{found.get(group.group_name, '')} {axis}"
    return found


def by_axis(sent: Counter[tuple[str, str]]) -> dict[str, float]:
    """Counted bytes under the names of the formula; of axes with the same ranks, the kind of exchange tells which."""
    of_kind = {
        "allgather": {"fsdp": "gather weights", "tp": "tensor parallel"},
        "reduce_scatter": {"fsdp": "reduce gradients", "tp": "tensor parallel"},
        "allreduce": {"replicate": "sum replicas", "tp": "tensor parallel", "cp": "context parallel"},
        "alltoall": {"cp": "context parallel"},
    }
    found: Counter[str] = Counter()
    for (kind, axes), size in sent.items():
        names = [name for axis, name in of_kind.get(kind, {}).items() if axis in axes.split()]
        found["pipeline" if kind == "send" else (names or ["small"])[0]] += size
    return dict(found)


def compare(layout: str) -> list[tuple[str, float, float]]:
    """(axis, counted, by formula) in bytes, means over the ranks."""
    world, options = LAYOUTS[layout]
    ranks = run(world, measure, options)
    counted: Counter[str] = Counter()
    expected: Counter[str] = Counter()
    for sent, formula in ranks:
        counted.update(by_axis(sent))
        expected.update(formula)
    names = [*expected, *(name for name in counted if name not in expected)]
    return [(name, counted[name] / world, expected[name] / world) for name in names]


def wrong(rows: list[tuple[str, float, float]]) -> list[str]:
    """Axes out of bounds."""
    whole = sum(counted for _, counted, _ in rows)
    return [
        name
        for name, counted, expected in rows
        if (abs(counted - expected) > BOUND * expected if expected else counted > 0.01 * whole)
    ]


def main() -> int:
    """Print the table; 1 when an axis is out of bounds."""
    print("| layout | what | counted, bytes a rank | formula | difference |")
    print("|---|---|---|---|---|")
    failed = False
    for layout in list(LAYOUTS)[:2] if "--small" in sys.argv[1:] else LAYOUTS:
        rows = compare(layout)
        bad = wrong(rows)
        failed |= bool(bad)
        for name, counted, expected in rows:
            difference = f"{counted / expected - 1:+.2%}" if expected else "-"
            note = " OUT OF BOUNDS" if name in bad else ""
            print(f"| {layout} | {name} | {counted:,.0f} | {expected:,.0f} | {difference}{note} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
