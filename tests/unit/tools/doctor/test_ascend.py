"""Hosts with Ascend NPUs: `npu-smi info` and files in the form that drivers print, good and with one fault each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.tools.doctor.hosts import host, severity

from covey.tools.doctor import ascend, ascend_settings
from covey.tools.doctor.ascend import Card, read_cards
from covey.tools.doctor.host import Host

LINE = "+===========================+===============+====================================================+"
NPU_SMI = f"""+------------------------------------------------------------------------------------------------+
| npu-smi 25.5.0                   Version: 25.5.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
{LINE}
| 0     910B2               | OK            | 97.3        48                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3384 / 65536         |
{LINE}
| 1     910B2               | OK            | 95.0        51                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3390 / 65536         |
{LINE}
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
{LINE}
| No running processes found in NPU 0                                                            |
{LINE}
"""
HOME = "usr/local/Ascend/cann"
FILES = {
    "dev/davinci0": "", "dev/davinci1": "", "dev/davinci_manager": "", "dev/devmm_svm": "", "dev/hisi_hdc": "",
    "usr/local/Ascend/driver/version.info": "Version=26.0.rc1\nascendhal_version=7.35.23\n",
    f"{HOME}/aarch64-linux/ascend_toolkit_install.info":
        "package_name=Ascend-cann-toolkit\nversion=9.1.0\ninnerversion=V100R001C25\narch=aarch64\nos=linux\n",
    "proc/sys/net/ipv4/ip_local_reserved_ports": "7000,60000-60015\n",
    "sys/class/net/eth0/mtu": "1500", "sys/class/net/lo/mtu": "65536",
}  # fmt: skip
ENV = {
    "ASCEND_HOME_PATH": f"/{HOME}", "HCCL_CONNECT_TIMEOUT": "1800", "CPU_AFFINITY_CONF": "1",
    "LD_PRELOAD": "/usr/lib/aarch64-linux-gnu/libjemalloc.so.2",
}  # fmt: skip
VERSIONS = {"torch": "2.10.0+cpu", "torch_npu": "2.10.0.post4"}


Texts = dict[str, str]


def npu_host(root: Path, *, files: Texts | None = None, env: Texts | None = None, **more: Any) -> Host:
    """A good Atlas 800T A2 with two chips, but for what is given."""
    more = {"outputs": {("npu-smi", "info"): NPU_SMI}, "versions": VERSIONS} | more
    return host(root, files=FILES | (files or {}), env=ENV | (env or {}), **more)


def test_cards_are_read():
    assert read_cards(NPU_SMI) == [
        Card(0, "910B2", "OK", 48.0, 3384, 65536),
        Card(1, "910B2", "OK", 51.0, 3390, 65536),
    ]


def test_cards_of_another_product_without_hbm_column():
    """As Huawei's reference prints it for Atlas 200I A2."""
    text = """
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 0       310B1                 | Alarm           | 10.4          66                15    / 15           |
| 0       0                     | NA              | 0            957   / 10810                           |
"""
    assert read_cards(text) == [Card(0, "310B1", "Alarm", 66.0, 957, 10810)]


def test_a_good_host_passes_every_check(tmp_path: Path):
    of = npu_host(tmp_path)
    outcomes = {check.__name__: check(of).severity for check in (*ascend.CHECKS, *ascend_settings.CHECKS)}
    assert outcomes.pop("check_vllm_pair") == "skipped"
    assert set(outcomes.values()) == {"ok"}, outcomes


def test_a_host_without_npus_skips_every_check(tmp_path: Path):
    of = host(tmp_path, versions={"torch": "2.10.0"})
    assert {check(of).severity for check in (*ascend.CHECKS, *ascend_settings.CHECKS)} == {"skipped"}


@pytest.mark.parametrize(("driver", "expected"), [("22.0.4", "failure"), ("24.1.rc3", "warning"), ("26.0.rc1", "ok")])
def test_driver_against_cann(driver: str, expected: str, tmp_path: Path):
    of = npu_host(tmp_path, files={"usr/local/Ascend/driver/version.info": f"Version={driver}\n"})
    assert severity(ascend.check_driver, of) == expected


def test_driver_that_is_not_mounted_into_the_container(tmp_path: Path):
    of = host(tmp_path, files={"dev/davinci0": ""})
    finding = ascend.check_driver(of)
    assert finding.severity == "failure"
    assert "mount" in finding.fix


@pytest.mark.parametrize(
    ("change", "expected", "found"),
    [
        (("| OK            | 95.0", "| Warning       | 95.0"), "warning", "1: Warning"),
        (("| OK            | 95.0", "| Critical      | 95.0"), "failure", "1: Critical"),
        (("3390 / 65536", "48000 / 65536"), "warning", "1: 48000 MB in use"),
    ],
)
def test_health(change: tuple[str, str], expected: str, found: str, tmp_path: Path):
    text = NPU_SMI.replace(*change)
    assert text != NPU_SMI
    finding = ascend.check_health(npu_host(tmp_path, outputs={("npu-smi", "info"): text}))
    assert (finding.severity, finding.found) == (expected, found)


def test_device_files_that_the_container_lacks(tmp_path: Path):
    of = npu_host(tmp_path)
    (tmp_path / "dev" / "hisi_hdc").unlink()
    finding = ascend.check_device_files(of)
    assert finding.severity == "failure"
    assert "missing: /dev/hisi_hdc" in finding.found


@pytest.mark.parametrize(
    ("cann", "plugin", "expected"),
    [
        ("9.1.0", "2.10.0.post4", "ok"),
        ("8.5.0", "2.10.0.post4", "ok"),  # 8.5, 9.0 and 9.1 run each other's releases
        ("8.3.RC2", "2.7.1", "ok"),
        ("8.3.RC2", "2.10.0.post4", "failure"),
        ("8.1.RC1", "2.5.1", "failure"),  # too old
        ("7.0.0", "2.1.0", "failure"),  # the seed's
        ("9.1.0", None, "warning"),
    ],
)
def test_cann_against_torch_npu(cann: str, plugin: str | None, expected: str, tmp_path: Path):
    info = f"package_name=Ascend-cann-toolkit\nversion={cann}\n"
    versions = {"torch": "2.10.0"} | ({"torch_npu": plugin} if plugin else {})
    of = npu_host(tmp_path, files={f"{HOME}/aarch64-linux/ascend_toolkit_install.info": info}, versions=versions)
    assert severity(ascend.check_cann, of) == expected


def test_cann_whose_variables_are_not_set(tmp_path: Path):
    of = host(tmp_path, files=FILES, versions=VERSIONS, outputs={("npu-smi", "info"): NPU_SMI})
    finding = ascend.check_cann(of)
    assert finding.severity == "failure"
    assert "set_env.sh" in finding.fix


@pytest.mark.parametrize(
    ("torch", "plugin", "expected"),
    [
        ("2.10.0+cpu", "2.10.0.post4", "ok"),
        ("2.9.0", "2.10.0.post4", "failure"),
        ("2.10.0+cu128", "2.10.0.post4", "failure"),
        ("2.5.1", "2.5.1", "failure"),
    ],
)
def test_pair_of_torch_and_torch_npu(torch: str, plugin: str, expected: str, tmp_path: Path):
    of = npu_host(tmp_path, versions={"torch": torch, "torch_npu": plugin})
    assert severity(ascend.check_torch_pair, of) == expected


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"vllm": "0.23.0", "vllm-ascend": "0.23.0"}, "ok"),
        ({"vllm": "0.11.0", "vllm-ascend": "0.23.0"}, "failure"),
        ({"vllm": "0.23.0", "vllm-ascend": "0.23.0", "triton": "3.5.0"}, "failure"),
        ({"vllm": "0.23.0"}, "failure"),
    ],
)
def test_pair_of_vllm(versions: dict[str, str], expected: str, tmp_path: Path):
    assert severity(ascend.check_vllm_pair, npu_host(tmp_path, versions=VERSIONS | versions)) == expected
