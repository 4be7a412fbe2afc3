"""Hosts with GPUs: outputs of nvidia-smi in its documented form, good and with one fault each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.tools.doctor.hosts import host, severity

from covey.tools.doctor import nvidia
from covey.tools.doctor.host import Host
from covey.tools.doctor.nvidia import QUERY, Card, read_cards

CSV = """0, NVIDIA H200, 570.86.15, 4, 143771, 0, 0x0000000000000000, 31
1, NVIDIA H200, 570.86.15, 4, 143771, 0, 0x0000000000000001, 33
"""
TOPOLOGY = """\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\t0-47\t0\t\tN/A
GPU1\tNV18\t X \t0-47\t0\t\tN/A

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
"""


def gpu_host(root: Path, csv: str = CSV, topology: str = TOPOLOGY, **more: Any) -> Host:
    more = {"versions": {"torch": "2.8.0+cu128"}} | more
    return host(root, outputs={QUERY: csv, ("nvidia-smi", "topo", "-m"): topology}, **more)


def test_cards_are_read_with_what_the_tool_does_not_know():
    text = "0, NVIDIA GeForce RTX 4090, 550.54.14, 512, 24564, [N/A], 0x0000000000000040, 84\n"
    assert read_cards(text) == [Card(0, "NVIDIA GeForce RTX 4090", "550.54.14", 512, 24564, 0, 0x40, 84)]


def test_a_good_host_passes_every_check(tmp_path: Path):
    of = gpu_host(tmp_path)
    outcomes = {check.__name__: check(of).severity for check in nvidia.CHECKS}
    assert outcomes.pop("check_infiniband") == "skipped"
    assert set(outcomes.values()) == {"ok"}, outcomes


def test_a_host_without_gpus_skips_every_check(tmp_path: Path):
    assert {check(host(tmp_path)).severity for check in nvidia.CHECKS} == {"skipped"}


@pytest.mark.parametrize(
    ("driver", "versions", "expected"),
    [
        ("570.86.15", {"torch": "2.8.0+cu128"}, "ok"),
        ("470.82.01", {"torch": "2.8.0+cu128"}, "failure"),
        ("570.86.15", {"torch": "2.10.0+cu130"}, "failure"),  # CUDA 13 needs 580
        ("570.86.15", {"torch": "2.8.0", "nvidia-cuda-runtime-cu12": "12.8.90"}, "ok"),
        ("570.86.15", {"torch": "2.10.0", "nvidia-cuda-runtime": "13.0.48"}, "failure"),
        ("570.86.15", {"torch": "2.8.0+cpu"}, "failure"),
    ],
)
def test_driver_against_torch(driver: str, versions: dict[str, str], expected: str, tmp_path: Path):
    of = gpu_host(tmp_path, CSV.replace("570.86.15", driver), versions=versions)
    assert severity(nvidia.check_driver, of) == expected


@pytest.mark.parametrize(
    ("csv", "expected", "found"),
    [
        (CSV.replace("143771, 0, 0x0000000000000001", "143771, 2, 0x0"), "failure", "1: 2 memory errors"),
        (CSV.replace("0x0000000000000001, 33", "0x0000000000000020, 92"), "warning", "1: throttled at 92 C"),
        (
            CSV.replace("15, 4,", "15, 90000,", 1),
            "warning",
            "0: 90000 MB in use",
        ),
    ],
)
def test_health(csv: str, expected: str, found: str, tmp_path: Path):
    finding = nvidia.check_health(gpu_host(tmp_path, csv))
    assert (finding.severity, finding.found) == (expected, found)


def test_cards_on_different_processors(tmp_path: Path):
    finding = nvidia.check_peers(gpu_host(tmp_path, topology=TOPOLOGY.replace("NV18", "SYS")))
    assert (finding.severity, finding.found) == ("warning", "SYS")
    assert severity(nvidia.check_peers, gpu_host(tmp_path, CSV.splitlines()[0])) == "skipped"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, "warning"),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, "ok"),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, "failure"),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, "ok"),
    ],
)
def test_variables(env: dict[str, str], expected: str, tmp_path: Path):
    of = gpu_host(tmp_path, env=env, files={"sys/class/net/eth0/mtu": "1500"})
    assert severity(nvidia.check_nccl, of) == expected


def test_infiniband(tmp_path: Path):
    port = "sys/class/infiniband/mlx5_0/ports/1/state"
    good = {port: "4: ACTIVE\n", "proc/modules": "nvidia_peermem 16384 0 - Live 0x0\n"}
    assert severity(nvidia.check_infiniband, gpu_host(tmp_path, files=good)) == "ok"
    down = nvidia.check_infiniband(gpu_host(tmp_path, files=good | {port: "1: DOWN\n"}))
    assert (down.severity, down.found) == ("warning", "mlx5_0:1 1: DOWN")
    limits = {"nofile": 65536, "nproc": -1, "memlock": 65536}
    assert severity(nvidia.check_infiniband, gpu_host(tmp_path, files=good, limits=lambda: limits)) == "warning"


def test_expandable_segments_beside_vllm(tmp_path: Path):
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert severity(nvidia.check_allocator, gpu_host(tmp_path, env=env)) == "ok"
    versions = {"torch": "2.8.0", "vllm": "0.11.0"}
    assert severity(nvidia.check_allocator, gpu_host(tmp_path, env=env, versions=versions)) == "warning"
