"""Settings of hosts with Ascend NPUs, one fault each, on a host that is good otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.tools.doctor.hosts import severity
from tests.unit.tools.doctor.test_ascend import npu_host

from covey.tools.doctor import ascend_settings as settings


def test_a_port_that_is_taken(tmp_path: Path):
    finding = settings.check_hccl_ports(npu_host(tmp_path, free_port=lambda port: port != 60003))
    assert finding.severity == "failure"
    assert finding.evidence["taken"] == [60003]


def test_ports_that_are_not_reserved(tmp_path: Path):
    reserved = {"proc/sys/net/ipv4/ip_local_reserved_ports": "60000-60007\n"}
    finding = settings.check_hccl_ports(npu_host(tmp_path, files=reserved))
    assert finding.severity == "warning"
    assert "ip_local_reserved_ports=60000-60015" in finding.fix


@pytest.mark.parametrize("base", ["65530", "80", "auto"])
def test_a_base_port_without_room(base: str, tmp_path: Path):
    assert severity(settings.check_hccl_ports, npu_host(tmp_path, env={"HCCL_IF_BASE_PORT": base})) == "failure"


@pytest.mark.parametrize(
    ("env", "expected", "found"),
    [
        ({"HCCL_CONNECT_TIMEOUT": "120"}, "warning", "HCCL_CONNECT_TIMEOUT=120"),
        ({"HCCL_EXEC_TIMEOUT": "1800", "HCCL_EVENT_TIMEOUT": "1800"}, "failure", "HCCL_EVENT_TIMEOUT"),
        ({"GLOO_SOCKET_IFNAME": "enp67s0f5"}, "failure", "no such interface (eth0, lo)"),
        ({"HCCL_SOCKET_IFNAME": "=eth0"}, "ok", "in order"),
    ],
)
def test_hccl_variables(env: dict[str, str], expected: str, found: str, tmp_path: Path):
    finding = settings.check_hccl_variables(npu_host(tmp_path, env=env))
    assert finding.severity == expected
    assert found in finding.found


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"ASCEND_LAUNCH_BLOCKING": "1"}, "warning"),
        ({"ASCEND_GLOBAL_LOG_LEVEL": "1"}, "warning"),
        ({"TASK_QUEUE_ENABLE": "0"}, "warning"),
        ({"INF_NAN_MODE_ENABLE": "0"}, "warning"),
        ({"TASK_QUEUE_ENABLE": "2", "ASCEND_GLOBAL_LOG_LEVEL": "3"}, "ok"),
        ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}, "ok"),
        ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"}, "failure"),
        ({"PYTORCH_NPU_ALLOC_CONF": "x", "PYTORCH_ALLOC_CONF": "y"}, "failure"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0,1,2"}, "ok"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "1,0"}, "failure"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0-7"}, "failure"),
    ],
)
def test_variables(env: dict[str, str], expected: str, tmp_path: Path):
    assert severity(settings.check_variables, npu_host(tmp_path, env=env)) == expected


def test_cores_for_each_chip(tmp_path: Path):
    assert severity(settings.check_binding, npu_host(tmp_path, cores=lambda: 15)) == "warning"
    assert severity(settings.check_binding, npu_host(tmp_path, cores=lambda: 16)) == "ok"


def test_buffers_against_the_chips_memory(tmp_path: Path):
    """4 groups x 2 buffers x 1000 MB of 65536 MB is over a twentieth, 200 MB under it."""
    assert severity(settings.check_hbm, npu_host(tmp_path, env={"HCCL_BUFFSIZE": "1000"})) == "warning"
    assert severity(settings.check_hbm, npu_host(tmp_path, env={"HCCL_BUFFSIZE": "200"})) == "ok"


def test_memory_allocator(tmp_path: Path):
    assert severity(settings.check_allocator, npu_host(tmp_path, env={"LD_PRELOAD": ""})) == "warning"
