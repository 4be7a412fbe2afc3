"""`covey selftest`: first contact with a device, in minutes, from numbers to a training run; writes one bundle.

The order is that of a fault's likely cause: single operations, attention, sampling, repeatability, exchanges between
processes, two steps of GRPO replayed on the CPU, speed. It runs on every device; on the CPU it is a regression test.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

import torch

from covey import device as devices
from covey import trainer
from covey.config.load import LoadedConfig
from covey.config.schema import Config
from covey.device import Device
from covey.distributed import mesh as meshes
from covey.distributed.collectives import max_dicts, sum_tensor, wait_for_all
from covey.findings import Finding, as_json
from covey.tools import tiny
from covey.tools.replay import replay
from covey.tools.replay_compare import verdict
from covey.tools.selftest import numbers, speed
from covey.tools.selftest.score import distinct_characters

MARKER = "SELFTEST"
_PACKAGES = re.compile(r"^(covey|torch.*|transformers|vllm.*|flash.attn|numpy)$")
_VARIABLES = re.compile(r"^(HCCL|ASCEND|TORCH|PYTORCH|NPU|TASK_QUEUE|CUDA|NCCL|OMP|CPU_AFFINITY|LCCL|INF_NAN)")


def run(out: Path, *, kind: str = "auto", on_finding: Callable[[Finding], None] | None = None) -> list[Finding]:
    """All checks on the device `kind`; writes OUT/selftest.json and the two-step run beside it.

    An earlier bundle in `out` is replaced; any other content is a ValueError. Under torchrun the exchanges between the
    ranks are checked too, and the first rank writes.
    """
    device = devices.resolve(kind, "auto", meshes.local_rank())
    main = meshes.is_main_process()
    if main:
        _clear(out)
    start, findings = time.perf_counter(), list[Finding]()
    for finding in _findings(device, out):
        findings.append(finding)
        if main and on_finding is not None:
            on_finding(finding)
    if main:
        bundle = {
            "device": device.describe(),
            "packages": _versions(),
            "host": {"machine": platform.machine(), "system": platform.platform(), "python": platform.python_version()},
            "environment": {k: v for k, v in sorted(os.environ.items()) if _VARIABLES.match(k)},
            "seconds": time.perf_counter() - start,
            **as_json(findings),
        }
        (out / "selftest.json").write_text(json.dumps(bundle, indent=1) + "\n", encoding="utf-8")
    meshes.stop()
    return findings


def _findings(device: Device, out: Path) -> Iterator[Finding]:
    yield from numbers.check_operations(device)
    yield from numbers.check_attention_shapes(device)
    yield numbers.check_sampling(device)
    yield numbers.check_determinism(device)
    yield from check_exchanges(device)
    if meshes.world_size() == 1:
        yield check_training(device, out)
    yield from speed.check_speed(device)


def check_exchanges(device: Device) -> Iterable[Finding]:
    """Sums and maxima over the ranks against sums worked out here, and what a communicator costs in memory."""
    world = meshes.world_size()
    if world == 1:
        how = "torchrun --nproc-per-node 2 -m covey selftest"
        yield Finding("exchanges", "skipped", "one process", "two or more", "several devices exchange sums", how)
        return
    before = device.memory_bytes()[0]
    mesh = meshes.start(communication=device.communication, device=device.torch_device, dp_shard=world)
    rank = torch.distributed.get_rank()
    problems: list[str] = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        mine = (torch.arange(1000) % 7 + rank).to(dtype).to(device.torch_device)
        total = sum_tensor(mine, mesh.world_group, what="selftest").cpu().to(torch.float64)
        expected = world * (torch.arange(1000) % 7).double() + world * (world - 1) / 2
        if not torch.allclose(total, expected, rtol=1e-2 if dtype == torch.bfloat16 else 0.0, atol=0.0):
            problems.append(f"the sum in {dtype} is off by {float((total - expected).abs().max()):g}")
    if max_dicts({"rank": float(rank)}, mesh.world_group, what="selftest")["rank"] != world - 1:
        problems.append("the largest rank is wrong")
    wait_for_all(mesh.world_group, what="selftest")
    used = max(0, before - device.memory_bytes()[0])
    yield Finding(
        rule="exchanges",
        severity="failure" if problems else "ok",
        found="; ".join(problems) or f"{world} ranks agree; {used / 2**20:.0f} MiB of memory taken meanwhile",
        expected="sums and maxima over all ranks",
        why="gradients and metrics of several devices would be wrong",
        fix="covey doctor: links, HCCL or NCCL variables, library versions" if problems else "",
        evidence={"ranks": world, "memory_bytes": used},
    )


def check_training(device: Device, out: Path) -> Finding:
    """Two steps of GRPO on the device, then the same rollouts on the CPU: rewards, loss, gradient, weights."""
    files = tiny.make_data(out / "data", seed=0)
    tiny.make_model(out / "start", seed=0)
    config = Config.model_validate(
        {
            "model": {"path": str(out / "start"), "dtype": "float32"},
            "data": {"train": str(files.train), "max_prompt_length": 16, "limit": 32},
            "rollout": {"num_samples": 4, "max_response_length": 40},
            "reward": {"functions": [f"{distinct_characters.__module__}:{distinct_characters.__name__}"]},
            "train": {"steps": 2, "batch_size": 4, "lr": 1e-4},
            "checkpoint": {"every": 1, "export": False},
            "output_dir": str(out / "run"),
            "device": device.kind,
        }
    )
    trainer.train(LoadedConfig(config, {}, "selftest"), quiet=True)
    result = replay(out / "run", 2, rollout=False, device="cpu")
    return Finding(
        rule="training",
        severity="ok" if result["pass"] else "failure",
        found=verdict(result),
        expected="two steps of GRPO that the CPU computes alike from the same rollouts",
        why="the parts are right one by one, and must be right together",
        fix=""
        if result["pass"]
        else "covey align capture on both devices, then covey align compare (docs/alignment.md)",
        evidence={"profile": str(result["profile"]), "first_difference": str(result["first_difference"])},
    )


def _versions() -> dict[str, str]:
    """Installed packages that numbers depend on."""
    found = {str(d.metadata["Name"]): d.version for d in metadata.distributions()}
    return {name: version for name, version in sorted(found.items()) if _PACKAGES.match(name)}


def _clear(out: Path) -> None:
    """Remove an earlier bundle, and nothing else."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MARKER).is_file())):
        raise ValueError(f"--out {out}: is there and is no earlier selftest; choose another directory")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARKER).write_text("Made by `covey selftest`; the next one replaces this directory.\n", encoding="utf-8")


def versions_line() -> str:
    """For the head of the report: torch 2.13.0, transformers ..."""
    return ", ".join(f"{name} {version}" for name, version in _versions().items())
