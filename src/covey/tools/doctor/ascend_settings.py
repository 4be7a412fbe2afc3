"""What is set on a host with Ascend NPUs: ports and variables of HCCL and torch_npu, processor cores, buffers.

Limits: CANN's reference of HCCL variables, torch_npu's environment variables, verl's and MindSpeed-RL's guides.
"""

from __future__ import annotations

import re

from covey.findings import Finding
from covey.tools.doctor.ascend import WHY_ABSENT, is_here, read_cards
from covey.tools.doctor.host import Host, gigabytes, judge, not_applicable

BASE_PORT, NUM_PORTS = 60000, 16  # HCCL_IF_BASE_PORT's default and how many ports it takes from there
MIN_CONNECT_S = 600  # ranks start a rollout's communicators minutes apart; CANN's default is 120 s
CORES_PER_NPU = 8  # dispatch, two pipeline threads of the task queue, data and reward workers
# Variables that make sense while looking for a fault, and what they cost when they are left on.
DEBUG_VARIABLES = {
    "ASCEND_LAUNCH_BLOCKING": "1",
    "ASCEND_SLOG_PRINT_TO_STDOUT": "1",
    "PYTORCH_NO_NPU_MEMORY_CACHING": "1",
    "TORCH_HCCL_BLOCKING_WAIT": "1",
    "INF_NAN_MODE_ENABLE": "0",
}


def check_hccl_ports(host: Host) -> Finding:
    """The ports that HCCL listens on."""
    why = "HCCL takes 16 ports from HCCL_IF_BASE_PORT; when one is taken, ranks fail with `Address already in use`"
    if not is_here(host):
        return not_applicable("hccl_ports", WHY_ABSENT, why)
    base = host.env.get("HCCL_IF_BASE_PORT", str(BASE_PORT))
    valid = base.isdigit() and 1024 <= int(base) <= 65535 - NUM_PORTS + 1
    taken = [port for port in range(int(base), int(base) + NUM_PORTS) if not host.free_port(port)] if valid else []
    reserved = valid and _covers(host.text("proc/sys/net/ipv4/ip_local_reserved_ports") or "", int(base))
    state = f"taken: {taken}" if taken else "free" if valid else "not a port"
    return judge(
        "hccl_ports",
        valid and not taken and reserved,
        severity="warning" if valid and not taken else "failure",
        found=f"{base} and the next {NUM_PORTS - 1}: {state}{'' if reserved else ', not reserved'}",
        expected="free, and reserved so that no client gets one by chance",
        why=why,
        fix=f"sysctl -w net.ipv4.ip_local_reserved_ports={base}-{int(base) + NUM_PORTS - 1}"
        if valid and not taken
        else "export HCCL_IF_BASE_PORT=50000 on every rank (or another free range)",
        taken=taken,
    )


def check_hccl_variables(host: Host) -> Finding:
    """Time limits and interfaces of HCCL."""
    why = "a rank that comes late ends the others; the wrong interface cannot reach the other host"
    if not is_here(host):
        return not_applicable("hccl_variables", WHY_ABSENT, why)
    env, wrong = host.env, []
    connect = env.get("HCCL_CONNECT_TIMEOUT", "120")
    if not connect.isdigit() or int(connect) < MIN_CONNECT_S:
        wrong.append(f"HCCL_CONNECT_TIMEOUT={connect}, under {MIN_CONNECT_S}")
    execution, event = env.get("HCCL_EXEC_TIMEOUT"), env.get("HCCL_EVENT_TIMEOUT")
    if execution and event and int(event) <= int(execution):
        wrong.append(f"HCCL_EVENT_TIMEOUT={event} is not above HCCL_EXEC_TIMEOUT={execution}")
    interfaces = host.entries("sys/class/net")
    for name in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        wanted = env.get(name)
        if wanted and not any(wanted.lstrip("=^").split(",")[0] in one for one in interfaces):
            wrong.append(f"{name}={wanted}, no such interface ({', '.join(interfaces)})")
    return judge(
        "hccl_variables",
        not wrong,
        severity="failure" if any("no such" in text or "not above" in text for text in wrong) else "warning",
        found="; ".join(wrong) or "in order",
        expected=f"HCCL_CONNECT_TIMEOUT from {MIN_CONNECT_S}, event above execution timeout, interfaces that exist",
        why=why,
        fix="export HCCL_CONNECT_TIMEOUT=1800; take the interface's name from `ip -br address`, alike on all ranks",
        wrong=wrong,
    )


def check_variables(host: Host) -> Finding:
    """Variables of torch_npu and CANN that slow a run down or break it."""
    why = "what is left on after a search for a fault costs speed; two allocator settings exclude each other"
    if not is_here(host):
        return not_applicable("ascend_variables", WHY_ABSENT, why)
    env = host.env
    wrong = [f"{name}={value}" for name, value in DEBUG_VARIABLES.items() if env.get(name) == value]
    level = env.get("ASCEND_GLOBAL_LOG_LEVEL", "3")
    wrong += [f"ASCEND_GLOBAL_LOG_LEVEL={level}"] if level in ("0", "1", "2") else []
    wrong += ["TASK_QUEUE_ENABLE=0"] if env.get("TASK_QUEUE_ENABLE") == "0" else []
    fatal: list[str] = []
    allocator = env.get("PYTORCH_NPU_ALLOC_CONF", "")
    if "expandable_segments:True" in allocator:
        others = [name for name in ("max_split_size_mb", "garbage_collection_threshold") if name in allocator]
        fatal += [f"expandable_segments with {name}" for name in others]
    if allocator and "PYTORCH_ALLOC_CONF" in env:
        fatal.append("PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF")
    devices = env.get("ASCEND_RT_VISIBLE_DEVICES", "0")
    parts = devices.split(",")
    if not all(part.strip().isdigit() for part in parts) or [int(p) for p in parts] != sorted({int(p) for p in parts}):
        fatal.append(f"ASCEND_RT_VISIBLE_DEVICES={devices}: not ascending numbers, the runtime counts 0 devices")
    return judge(
        "ascend_variables",
        not wrong and not fatal,
        severity="failure" if fatal else "warning",
        found="; ".join([*fatal, *wrong]) or "in order",
        expected="none of a search for faults, no two that exclude each other",
        why=why,
        fix="unset what is named; `covey train --set debug=true` sets what it needs itself",
        wrong=[*fatal, *wrong],
    )


def check_binding(host: Host) -> Finding:
    """Processor cores for each NPU."""
    why = "launches come from the processor; ranks that share cores wait for each other at every collective"
    if not is_here(host):
        return not_applicable("cpu_binding", WHY_ABSENT, why)
    cards = len(read_cards(host.command(["npu-smi", "info"]) or "")) or 1
    cores, binding = host.cores(), host.env.get("CPU_AFFINITY_CONF")
    return judge(
        "cpu_binding",
        cores >= CORES_PER_NPU * cards and binding is not None,
        severity="warning",
        found=f"{cores} cores for {cards} NPUs, CPU_AFFINITY_CONF={binding or 'not set'}",
        expected=f"{CORES_PER_NPU} cores an NPU, CPU_AFFINITY_CONF=1 (2: finer)",
        why=why,
        fix="export CPU_AFFINITY_CONF=1; it has no effect in a process that taskset or a cpuset has bound already",
        cores=cores,
        cards=cards,
    )


def check_allocator(host: Host) -> Finding:
    """The host's memory allocator."""
    why = "glibc's keeps freed blocks of long runs; resident memory grows by gigabytes over days"
    if not is_here(host):
        return not_applicable("malloc", WHY_ABSENT, why)
    preload = host.env.get("LD_PRELOAD", "")
    return judge(
        "malloc",
        "jemalloc" in preload or "tcmalloc" in preload,
        severity="warning",
        found=f"LD_PRELOAD={preload or 'not set'}",
        expected="jemalloc or tcmalloc",
        why=why,
        fix="export LD_PRELOAD=/usr/lib/$(uname -m)-linux-gnu/libjemalloc.so.2",
    )


def check_hbm(host: Host) -> Finding:
    """Communication buffers against the chip's memory."""
    why = "HCCL keeps two buffers of HCCL_BUFFSIZE for every group of ranks, outside torch's allocator"
    if not is_here(host):
        return not_applicable("hccl_buffers", WHY_ABSENT, why)
    groups = 4  # of a run with data, tensor and pipeline parallelism, and the world
    size = host.env.get("HCCL_BUFFSIZE", "200")
    cards = read_cards(host.command(["npu-smi", "info"]) or "")
    total = cards[0].hbm_total_mb if cards else 65536
    need = 2 * groups * int(size) if size.isdigit() else 0
    return judge(
        "hccl_buffers",
        0 < need <= total / 20,
        severity="warning",
        found=f"HCCL_BUFFSIZE={size} MB: {gigabytes(need * 2**20)} of {gigabytes(total * 2**20)} for {groups} groups",
        expected="at most a twentieth of the memory",
        why=why,
        fix="export HCCL_BUFFSIZE=200 or less on every rank",
        need_mb=need,
    )


CHECKS = (check_hccl_ports, check_hccl_variables, check_variables, check_binding, check_hbm, check_allocator)


def _covers(reserved: str, base: int) -> bool:
    """Whether every port from base on lies in ranges such as `60000-60015,7000`."""
    ports: set[int] = set()
    for low, high in re.findall(r"(\d+)(?:-(\d+))?", reserved):
        ports.update(range(int(low), int(high or low) + 1))
    return set(range(base, base + NUM_PORTS)) <= ports
