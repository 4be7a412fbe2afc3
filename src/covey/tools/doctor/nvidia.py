"""Checks of a host with NVIDIA GPUs: driver, health, peer access, NCCL, InfiniBand, left-over debug variables.

Sources: nvidia-smi's and NCCL's manuals, torch's notes on its allocator. Not run on a GPU host with several cards.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from covey.findings import Finding
from covey.tools.doctor.host import Host, judge, not_applicable, numbers

QUERY = (
    "nvidia-smi",
    "--query-gpu=index,name,driver_version,memory.used,memory.total,ecc.errors.uncorrected.volatile.total,"
    "clocks_throttle_reasons.active,temperature.gpu",
    "--format=csv,noheader,nounits",
)
# CUDA release -> oldest Linux driver (CUDA toolkit release notes, table of minor-version compatibility).
DRIVER_OF_CUDA = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
IDLE_MB = 2048  # contexts of a display and of a monitor; more is a process that was left behind
# Throttling for heat or power brake (nvml.h): 0x20 software thermal, 0x40 hardware thermal, 0x80 hardware power brake.
THROTTLED = 0x20 | 0x40 | 0x80
DEBUG_VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_SHM_DISABLE",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)
_WHY_ABSENT = "this host has no NVIDIA GPU"


@dataclass(frozen=True)
class Card:
    """A GPU as nvidia-smi shows it. Example: Card(0, "H200", "570.86.15", 4, 143771, 0, 0, 35)"""

    index: int
    name: str
    driver: str
    used_mb: int
    total_mb: int
    ecc_errors: int
    throttle: int  # bits of nvml.h
    celsius: int


def read_cards(text: str) -> list[Card]:
    """The lines of QUERY. `[N/A]` counts as 0."""
    cards: list[Card] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 8:
            used, total, ecc, throttle, celsius = (_number(cell) for cell in cells[3:])
            cards.append(Card(_number(cells[0]), cells[1], cells[2], used, total, ecc, throttle, celsius))
    return cards


def check_driver(host: Host) -> Finding:
    """The driver against the CUDA release that torch was built for."""
    why = "torch's libraries refuse an older driver"
    cards = _cards(host)
    if not cards:
        return not_applicable("nvidia_driver", _WHY_ABSENT, why)
    torch = host.version("torch") or ""
    release = _release(host, torch)
    wanted = DRIVER_OF_CUDA.get(release, (0,))
    cpu_only = "+cpu" in torch
    return judge(
        "nvidia_driver",
        numbers(cards[0].driver)[:2] >= wanted and not cpu_only,
        found=f"driver {cards[0].driver}, torch {torch}",
        expected=f"at least {'.'.join(map(str, wanted))} for CUDA {release or 'unknown'}, and torch's build for it",
        why=why,
        fix="pip install torch from the index of an older CUDA release (or without +cpu), or update the driver",
    )


def check_health(host: Host) -> Finding:
    """Memory errors, heat, memory in use."""
    why = "a card with memory errors ends a run; one that slows down for heat holds all ranks up"
    cards = _cards(host)
    if not cards:
        return not_applicable("nvidia_health", _WHY_ABSENT, why)
    errors = [f"{card.index}: {card.ecc_errors} memory errors" for card in cards if card.ecc_errors]
    slow = [f"{card.index}: throttled at {card.celsius} C" for card in cards if card.throttle & THROTTLED]
    taken = [f"{card.index}: {card.used_mb} MB in use" for card in cards if card.used_mb > IDLE_MB]
    return judge(
        "nvidia_health",
        not errors and not slow and not taken,
        severity="failure" if errors else "warning",
        found="; ".join([*errors, *slow, *taken]) or f"{len(cards)} x {cards[0].name}",
        expected=f"no errors, no throttling, at most {IDLE_MB} MB in use before a start",
        why=why,
        fix="nvidia-smi -q -d ECC,PERFORMANCE; end processes left behind; see to the cooling; leave the card out of "
        "CUDA_VISIBLE_DEVICES",
        cards=[vars(card) for card in cards],
    )


def check_peers(host: Host) -> Finding:
    """How the cards reach each other."""
    why = "without direct access between cards every exchange goes through host memory"
    cards = _cards(host)
    if len(cards) < 2:
        return not_applicable("nvidia_topology", _WHY_ABSENT if not cards else "one GPU", why)
    table = host.command(["nvidia-smi", "topo", "-m"]) or ""
    rows = [line.split() for line in table.splitlines() if re.match(r"\s*GPU\d+\s", line)]
    links = {cell for row in rows for cell in row[1:] if re.fullmatch(r"NV\d+|PIX|PXB|PHB|NODE|SYS", cell)}
    far = links & {"SYS", "NODE"}
    return judge(
        "nvidia_topology",
        bool(rows) and not far,
        severity="warning",
        found=", ".join(sorted(links)) or "unknown",
        expected="NVLink (NV#) or one PCIe switch (PIX, PXB) between cards that cut a layer",
        why=why,
        fix="put ranks of parallel.tp on near cards (CUDA_VISIBLE_DEVICES); between others use parallel.dp_shard",
        links=sorted(links),
    )


def check_nccl(host: Host) -> Finding:
    """Variables that a search for a fault leaves behind, and interfaces."""
    why = "each of them turns a fast way between cards off, or makes every launch wait"
    if not _cards(host):
        return not_applicable("nccl_variables", _WHY_ABSENT, why)
    on = [f"{name}={host.env[name]}" for name in DEBUG_VARIABLES if host.env.get(name, "0") not in ("", "0")]
    interfaces = host.entries("sys/class/net")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = host.env.get(name)
        if wanted and not wanted.startswith("^") and not any(wanted.lstrip("=").split(",")[0] in i for i in interfaces):
            on.append(f"{name}={wanted}, no such interface ({', '.join(interfaces)})")
    return judge(
        "nccl_variables",
        not on,
        severity="failure" if any("no such" in text for text in on) else "warning",
        found="; ".join(on) or "in order",
        expected="none set, interfaces that exist",
        why=why,
        fix="unset what is named; take the interface's name from `ip -br address`",
        wrong=on,
    )


def check_infiniband(host: Host) -> Finding:
    """Ports of InfiniBand or RoCE, and locked memory for them."""
    adapters = host.entries("sys/class/infiniband")
    why = "between hosts NCCL falls back to TCP, ten times slower, when no port is active"
    if not _cards(host) or not adapters:
        return not_applicable("infiniband", "no GPU" if not _cards(host) else "no InfiniBand adapter", why)
    states = {
        f"{adapter}:{port}": (host.text(f"sys/class/infiniband/{adapter}/ports/{port}/state") or "").strip()
        for adapter in adapters
        for port in host.entries(f"sys/class/infiniband/{adapter}/ports")
    }
    down = [f"{port} {state}" for port, state in states.items() if "ACTIVE" not in state]
    peer = "nvidia_peermem" in (host.text("proc/modules") or "")
    locked = host.limits()["memlock"]
    wrong = [*down, *([] if peer else ["nvidia_peermem is not loaded"]), *([] if locked < 0 else [f"memlock {locked}"])]
    return judge(
        "infiniband",
        not wrong,
        severity="warning",
        found="; ".join(wrong) or f"{len(states)} ports active",
        expected="every port ACTIVE, nvidia_peermem loaded, memlock unlimited",
        why=why,
        fix="modprobe nvidia_peermem; ulimit -l unlimited (docker run --ulimit memlock=-1); ibstat for the ports",
        ports=states,
    )


def check_allocator(host: Host) -> Finding:
    """Is the allocator's configuration compatible with a rollout engine that sleeps?"""
    why = "vLLM's sleep mode maps memory itself and refuses expandable segments in its process"
    if not _cards(host):
        return not_applicable("cuda_allocator", _WHY_ABSENT, why)
    setting = host.env.get("PYTORCH_CUDA_ALLOC_CONF", host.env.get("PYTORCH_ALLOC_CONF", ""))
    clash = "expandable_segments:True" in setting and host.version("vllm") is not None
    return judge(
        "cuda_allocator",
        not clash,
        severity="warning",
        found=setting or "not set",
        expected="no expandable_segments in the process of vLLM",
        why=why,
        fix="unset PYTORCH_CUDA_ALLOC_CONF where vLLM shares the trainer's process",
    )


CHECKS = (check_driver, check_health, check_peers, check_nccl, check_infiniband, check_allocator)


def _cards(host: Host) -> list[Card]:
    return read_cards(host.command(QUERY) or "")


def _release(host: Host, torch: str) -> int:
    """The CUDA release of torch's libraries: of its version's suffix, or of the runtime package; 0: unknown."""
    if build := re.search(r"\+cu(\d\d)", torch):
        return int(build[1])
    for package in ("nvidia-cuda-runtime-cu11", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime"):
        if version := host.version(package):
            return numbers(version)[0]
    return 0


def _number(cell: str) -> int:
    found = re.fullmatch(r"0x([0-9a-fA-F]+)|(\d+)(?:\.\d+)?", cell)
    if found is None:
        return 0
    return int(found[1], 16) if found[1] else int(found[2])
