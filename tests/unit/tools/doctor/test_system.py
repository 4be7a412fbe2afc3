"""Checks of every host, on hosts made for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.tools.doctor.hosts import GIB, host, severity

from covey.tools.doctor import system

MEMINFO = """MemTotal:       65843712 kB
MemFree:         1000000 kB
MemAvailable:   52428800 kB
HugePages_Total:     512
HugePages_Free:      512
Hugepagesize:       2048 kB
"""


PYTHONS = [((3, 9), "failure"), ((3, 10), "ok"), ((3, 13), "ok"), ((3, 14), "failure")]


@pytest.mark.parametrize(("python", "expected"), PYTHONS)
def test_python(python: tuple[int, int], expected: str, tmp_path: Path):
    assert severity(system.check_python, host(tmp_path, python=python)) == expected


def test_packages_names_what_is_missing_and_what_is_too_old(tmp_path: Path):
    wanted = ["torch>=2.7", "numpy>=1.26", "peft>=0.15; extra == 'lora'", "pyyaml>=6"]
    of = host(tmp_path, requirements=lambda: wanted, versions={"torch": "2.6.0", "numpy": "2.1"})
    finding = system.check_packages(of)
    assert finding.severity == "failure"
    assert finding.found == "torch 2.6.0, not >=2.7; pyyaml is missing"
    met = host(tmp_path, requirements=lambda: wanted, versions={"torch": "2.10.0+cpu", "numpy": "2.1", "pyyaml": "6.0"})
    assert system.check_packages(met).found == "3 packages"


def test_extras_are_listed(tmp_path: Path):
    finding = system.check_extras(host(tmp_path, versions={"peft": "0.17"}))
    assert "lora (0.17)" in finding.found
    assert "wandb" in finding.found.split("not installed")[1]


def test_device_that_computes_wrongly_or_not_at_all(tmp_path: Path):
    wrong = {"kind": "cpu", "name": "x", "dtype": "float32", "error": 1e-3}  # what TF32 would give
    assert severity(system.check_device, host(tmp_path, product=lambda: wrong)) == "failure"
    broken = system.check_device(host(tmp_path, product=lambda: {"failed": "no driver"}))
    assert broken.severity == "failure"
    assert "no driver" in broken.found
    half = {"kind": "cpu", "name": "x", "dtype": "bfloat16", "error": 3e-3}
    assert severity(system.check_device, host(tmp_path, product=lambda: half)) == "ok"


def test_shared_memory_of_a_container(tmp_path: Path):
    assert severity(system.check_shm, host(tmp_path)) == "skipped"
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    docker = system.check_shm(host(tmp_path, disk=lambda path: (64 * 2**20, 64 * 2**20)))
    assert (docker.severity, docker.found) == ("warning", "0.1 GiB")
    assert "--shm-size" in docker.fix
    assert severity(system.check_shm, host(tmp_path, disk=lambda path: (16 * GIB, 16 * GIB))) == "ok"


def test_limits(tmp_path: Path):
    usual = host(tmp_path, limits=lambda: {"nofile": 1024, "nproc": -1, "memlock": 65536})
    finding = system.check_limits(usual)
    assert finding.severity == "warning"
    assert "nofile 1024" in finding.found
    assert (
        severity(system.check_limits, host(tmp_path, limits=lambda: {"nofile": -1, "nproc": -1, "memlock": -1})) == "ok"
    )


def test_huge_pages_are_read(tmp_path: Path):
    files = {"proc/meminfo": MEMINFO, "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n"}
    finding = system.check_huge_pages(host(tmp_path, files=files))
    assert finding.found == "512 of 2048 KiB; transparent: madvise"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cores_are_bound_by_the_control_group(files: dict[str, str], quota: float | None, tmp_path: Path):
    finding = system.check_cores(host(tmp_path, files=files))
    assert finding.evidence["quota"] == quota
    assert finding.severity == ("warning" if quota else "ok")


def test_memory_is_bound_by_the_control_group(tmp_path: Path):
    free = system.check_memory(host(tmp_path, files={"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": "max\n"}))
    assert (free.severity, free.found) == ("ok", "50.0 GiB free of 62.8 GiB")
    bound = system.check_memory(host(tmp_path, files={"sys/fs/cgroup/memory.max": str(2 * GIB)}))
    assert bound.severity == "warning"
    assert "limited to 2.0 GiB" in bound.found


def test_disk_and_sandbox(tmp_path: Path):
    assert severity(system.check_disk, host(tmp_path, disk=lambda path: (GIB, 100 * GIB))) == "warning"
    assert severity(system.check_disk, host(tmp_path)) == "ok"
    assert severity(system.check_sandbox, host(tmp_path, sandbox=lambda: None)) == "warning"


def test_rendezvous_port(tmp_path: Path):
    assert severity(system.check_rendezvous, host(tmp_path)) == "skipped"
    taken = host(tmp_path, env={"MASTER_PORT": "29500"}, free_port=lambda port: port != 29500)
    assert severity(system.check_rendezvous, taken) == "failure"
    assert severity(system.check_rendezvous, host(tmp_path, env={"MASTER_PORT": "29500"})) == "ok"
    assert severity(system.check_rendezvous, host(tmp_path, env={"MASTER_PORT": "http"})) == "failure"
