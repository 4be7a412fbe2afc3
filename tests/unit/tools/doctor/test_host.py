"""What Host reads of the machine it runs on, and how findings are made."""

from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path

import pytest

from covey.tools.doctor.host import (
    Host,
    disk_bytes,
    examine,
    installed_version,
    judge,
    limits_of_process,
    not_applicable,
    numbers,
    port_is_free,
    product_of_matrices,
    run_command,
)


def test_commands_that_fail_or_do_not_exist_have_no_output():
    assert run_command([sys.executable, "-c", "print('hello')"]) == "hello\n"
    assert run_command([sys.executable, "-c", "raise SystemExit(3)"]) is None
    assert run_command(["no-such-tool-anywhere"]) is None


def test_a_port_is_free_until_somebody_listens():
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not port_is_free(port)
    assert port_is_free(port)


def test_limits_are_the_soft_ones():
    assert limits_of_process()["nofile"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_disk_of_a_path_that_does_not_exist_is_its_parents(tmp_path: Path):
    stat = os.statvfs(tmp_path)
    assert disk_bytes(tmp_path / "a" / "b")[1] == pytest.approx(stat.f_blocks * stat.f_frsize, rel=0.01)


def test_version_of_a_package_that_is_missing():
    assert installed_version("no-such-package-anywhere") is None
    assert installed_version("torch") == __import__("torch").__version__


@pytest.mark.parametrize(
    ("text", "parts"),
    [("2.10.0.post4", (2, 10, 0)), ("2.10.0+cpu", (2, 10, 0)), ("26.0.rc1", (26, 0)), ("V25.5", (25, 5)), ("x", ())],
)
def test_numbers_of_a_version(text: str, parts: tuple[int, ...]):
    assert numbers(text) == parts


def test_product_on_this_machine_is_right():
    result = product_of_matrices()
    assert result["kind"] == "cpu"
    assert 0 < result["error"] < 1e-5


def test_a_good_finding_has_no_fix_and_a_skipped_one_says_why():
    good = judge("x", True, found="a", expected="b", why="c", fix="d", number=3)
    assert (good.severity, good.fix, good.evidence) == ("ok", "", {"number": 3})
    assert judge("x", False, found="a", expected="b", why="c", fix="d", severity="warning").severity == "warning"
    assert not_applicable("x", "no such card", "w").found == "does not apply: no such card"


def test_this_host_gives_one_finding_a_check_and_other_devices_do_not_apply():
    findings = examine(Host())
    assert len({finding.rule for finding in findings}) == len(findings) >= 30
    by_rule = {finding.rule: finding for finding in findings}
    assert by_rule["python"].severity == "ok"
    assert by_rule["device"].severity == "ok"
    for finding in findings:
        assert finding.why
        assert bool(finding.fix) == (finding.severity in ("warning", "failure")), finding
