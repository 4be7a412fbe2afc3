"""Checks of a host with Ascend NPUs: driver, health, device files, CANN, packages. More: ascend_settings.py.

Tables: torch_npu's COMPATIBILITY.md (releases 5.0.0 to 26.1.0), vllm-ascend's versioning policy, verl's installation
guide. Read in 2026, not run on an NPU. `npu-smi info` is read in the form that drivers 23 to 26 print.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from covey.findings import Finding
from covey.tools.doctor.host import Host, judge, not_applicable, numbers

# CANN release -> torch_npu that is made for it (COMPATIBILITY.md). The releases from 8.5 on run each other's torch_npu.
SUPPORT = {
    "9.1": ("2.12.0", "2.11.0", "2.10.0", "2.9.0", "2.7.1"),
    "9.0": ("2.10.0", "2.9.0", "2.8.0", "2.7.1"),
    "8.5": ("2.9.0", "2.8.0", "2.7.1", "2.6.0"),
    "8.3": ("2.8.0", "2.7.1", "2.6.0"),
    "8.2": ("2.6.0", "2.5.1"),
    "8.1": ("2.5.1",),
    "7.0": ("2.1.0",),
}
_INTERCHANGEABLE = ("9.1", "9.0", "8.5")
OLDEST_CANN = (8, 3)  # the first with fully_shard, the packed attention's softmax layout and shared device memory
OLDEST_TORCH = (2, 7, 1)  # the oldest torch_npu release for it
# vllm-ascend's versioning policy: its release serves the vLLM of the same number.
OLDEST_DRIVER = (23,)  # older ones have no expandable segments
IPC_DRIVER = (25, 3)  # older ones cannot pass device memory between processes
DRIVER_OF_CANN = {"9.1": (26, 0), "9.0": (25, 5), "8.5": (25, 5)}  # verl and MindSpeed-RL pin these pairs
HEALTHY = ("OK",)
# An idle card holds about 3.4 GB for its own system; more is a process that was left behind.
IDLE_HBM_MB = 4096
DEVICE_FILES = ("davinci_manager", "devmm_svm", "hisi_hdc")  # a container without them has no NPU
WHY_ABSENT = "this host has no Ascend NPU"


@dataclass(frozen=True)
class Card:
    """A chip as `npu-smi info` shows it. Example: Card(0, "910B2", "OK", 48.0, 3384, 65536)"""

    index: int
    name: str
    health: str
    celsius: float
    hbm_used_mb: int
    hbm_total_mb: int


def read_cards(text: str) -> list[Card]:
    """The chips of `npu-smi info`: two lines each, of which the first has the name, the second the memory."""
    cards: list[Card] = []
    first: tuple[int, str, str, float] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3:
            continue
        upper = re.fullmatch(r"(\d+)\s+(\S+)", cells[0])
        if first is None and upper and re.fullmatch(r"[A-Za-z]+", cells[1]):
            temperature = re.match(r"\S+\s+(\d+(?:\.\d+)?)", cells[2])
            first = (int(upper[1]), upper[2], cells[1], float(temperature[1]) if temperature else 0.0)
        elif first is not None:
            memory = re.findall(r"(\d+)\s*/\s*(\d+)", cells[2])
            used, total = memory[-1] if memory else ("0", "0")  # HBM stands last
            cards.append(Card(*first, int(used), int(total)))
            first = None
    return cards


def check_driver(host: Host) -> Finding:
    """The driver's version, and whether it suits CANN."""
    why = "an old driver lacks functions that torch_npu and HCCL call"
    if not is_here(host):
        return not_applicable("ascend_driver", WHY_ABSENT, why)
    text = host.text("usr/local/Ascend/driver/version.info") or ""
    found = re.search(r"^Version=(\S+)", text, flags=re.MULTILINE)
    shown = re.search(r"Version:\s*(\S+)", host.command(["npu-smi", "info"]) or "")
    version = found[1] if found else shown[1] if shown else ""
    if not version:
        fix = "mount /usr/local/Ascend/driver, /usr/local/bin/npu-smi and /usr/local/dcmi into the container"
        return Finding("ascend_driver", "failure", "neither npu-smi nor version.info", "a driver", why, fix)
    wanted = max(OLDEST_DRIVER, DRIVER_OF_CANN.get(_series(_cann(host)), OLDEST_DRIVER))
    old = numbers(version) < OLDEST_DRIVER
    return judge(
        "ascend_driver",
        numbers(version) >= max(wanted, IPC_DRIVER),
        severity="failure" if old else "warning",
        found=version,
        expected=f"at least {_dotted(max(wanted, IPC_DRIVER))} (with CANN {_cann(host) or 'unknown'})",
        why=f"{why}; before {_dotted(IPC_DRIVER)} weights cannot be handed to another process on the card",
        fix="install the HDK (driver and firmware) that CANN's release notes name, and reboot",
        version=version,
    )


def check_health(host: Host) -> Finding:
    """Every chip: healthy, cool, empty."""
    why = "a run hangs or fails on one bad card; memory that another process holds is missing"
    if not is_here(host):
        return not_applicable("ascend_health", WHY_ABSENT, why)
    cards = read_cards(host.command(["npu-smi", "info"]) or "")
    sick = [f"{card.index}: {card.health}" for card in cards if card.health not in HEALTHY]
    taken = [f"{card.index}: {card.hbm_used_mb} MB in use" for card in cards if card.hbm_used_mb > IDLE_HBM_MB]
    bad = any(card.health in ("Alarm", "Critical", "UNKNOWN") for card in cards)
    return judge(
        "ascend_health",
        bool(cards) and not sick and not taken,
        severity="failure" if bad or not cards else "warning",
        found="; ".join([*sick, *taken]) or (f"{len(cards)} x {cards[0].name}, OK" if cards else "no chip listed"),
        expected=f"every chip OK, at most {IDLE_HBM_MB} MB in use before a start",
        why=why,
        fix="npu-smi info -t health -i N names the fault; end processes left behind; else take the card out of "
        "ASCEND_RT_VISIBLE_DEVICES",
        cards=[vars(card) for card in cards],
    )


def check_device_files(host: Host) -> Finding:
    """What a container needs of /dev."""
    why = "without them the runtime counts no device"
    if not is_here(host):
        return not_applicable("ascend_devices", WHY_ABSENT, why)
    names = host.entries("dev")
    absent = [f"/dev/{name}" for name in DEVICE_FILES if name not in names]
    chips = [name for name in names if re.fullmatch(r"davinci\d+", name)]
    return judge(
        "ascend_devices",
        not absent and bool(chips),
        found=f"{len(chips)} chips" + (f"; missing: {', '.join(absent)}" if absent else ""),
        expected="/dev/davinciN, " + ", ".join(f"/dev/{name}" for name in DEVICE_FILES),
        why=why,
        fix="docker run --device /dev/davinci0 ... --device /dev/davinci_manager --device /dev/devmm_svm "
        "--device /dev/hisi_hdc",
        chips=len(chips),
    )


def check_cann(host: Host) -> Finding:
    """CANN is there, its variables are set, its version suits torch_npu."""
    why = "torch_npu is built for certain releases of CANN; with another one symbols are missing at import"
    if not is_here(host):
        return not_applicable("cann", WHY_ABSENT, why)
    if "ASCEND_HOME_PATH" not in host.env:
        fix = (
            "source /usr/local/Ascend/ascend-toolkit/set_env.sh (from CANN 8.5 also /usr/local/Ascend/cann/set_env.sh)"
        )
        return Finding("cann", "failure", "ASCEND_HOME_PATH is not set", "a sourced set_env.sh", why, fix)
    version, plugin = _cann(host), host.version("torch_npu") or ""
    series = _series(version)
    rows = _INTERCHANGEABLE if series in _INTERCHANGEABLE else (series,)
    known = {base for row in rows for base in SUPPORT.get(row, ())}
    old = bool(version) and numbers(version)[:2] < OLDEST_CANN
    fits = _dotted(numbers(plugin)[:3]) in known
    return judge(
        "cann",
        bool(version) and not old and fits,
        severity="failure" if old or not version else "warning" if not plugin else "failure",
        found=f"CANN {version or 'of unknown version'} with torch_npu {plugin or '(not installed)'}",
        expected=f"CANN from {_dotted(OLDEST_CANN)}; torch_npu of its row: {', '.join(sorted(known)) or 'none known'}",
        why=why,
        fix="pip install torch==2.10.0 torch_npu==2.10.0.post4 on CANN 9.1, or the pair of your CANN's row",
        cann=version,
        torch_npu=plugin,
    )


def check_torch_pair(host: Host) -> Finding:
    """torch and torch_npu of one version, torch without another device's libraries."""
    why = "torch_npu is compiled against one torch; with another the import fails with an undefined symbol"
    torch, plugin = host.version("torch") or "", host.version("torch_npu")
    if not is_here(host) and plugin is None:
        return not_applicable("torch_npu", WHY_ABSENT, why)
    if plugin is None:
        return Finding("torch_npu", "failure", "not installed", "torch_npu", why, "pip install 'covey[npu]'")
    same = numbers(torch)[:3] == numbers(plugin)[:3]
    return judge(
        "torch_npu",
        same and "+cu" not in torch and numbers(plugin) >= OLDEST_TORCH,
        found=f"torch {torch or '(missing)'}, torch_npu {plugin}",
        expected=f"one version, at least {_dotted(OLDEST_TORCH)}; torch's build for cpu",
        why=why,
        fix="pip install torch==X+cpu torch_npu==X.postN, with X from the row of your CANN",
    )


def check_vllm_pair(host: Host) -> Finding:
    """vLLM and vllm-ascend of one release."""
    vllm, plugin = host.version("vllm"), host.version("vllm-ascend")
    why = "vllm-ascend replaces functions of exactly one vLLM release"
    if not is_here(host) or (vllm is None and plugin is None):
        return not_applicable("vllm_ascend", "no vLLM on an Ascend host", why)
    pair = vllm is not None and plugin is not None and numbers(vllm)[:2] == numbers(plugin)[:2]
    shadowed = host.version("triton") is not None
    return judge(
        "vllm_ascend",
        pair and not shadowed,
        found=f"vllm {vllm}, vllm-ascend {plugin}" + (", triton of another device" if shadowed else ""),
        expected="equal major and minor numbers, and no package `triton` beside triton-ascend",
        why=why,
        fix="VLLM_TARGET_DEVICE=empty pip install vllm==0.23.0; pip install vllm-ascend==0.23.0; pip uninstall triton",
    )


CHECKS = (check_driver, check_health, check_device_files, check_cann, check_torch_pair, check_vllm_pair)


def is_here(host: Host) -> bool:
    """Whether there is any trace of an NPU: its device files, its driver, its tool, its plug-in."""
    return (
        any(re.fullmatch(r"davinci(\d+|_manager)", name) for name in host.entries("dev"))
        or host.path("usr/local/Ascend/driver").is_dir()
        or host.command(["npu-smi", "info"]) is not None
    )


def _cann(host: Host) -> str:
    """CANN's version from its installation file; "" when unknown."""
    home = host.env.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest").lstrip("/")
    for machine in ("aarch64", "x86_64"):
        text = host.text(f"{home}/{machine}-linux/ascend_toolkit_install.info")
        if found := re.search(r"^version=(\S+)", text or "", flags=re.MULTILINE):
            return found[1]
    return ""


def _series(version: str) -> str:
    return _dotted(numbers(version)[:2])


def _dotted(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))
