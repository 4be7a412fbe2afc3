"""Programs that attack the sandbox, each really run. docs/sandbox.md holds the table that `python THIS_FILE` prints.

A program prints BREACH when it got what it wanted; the test also looks from outside: at files, listeners, processes.
Bombs run only in a sandbox whose process limit the start-up probe has just seen hold.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from covey.rewards.code_tests import code_reward
from covey.rewards.sandbox import Limits, Result, Sandbox, find_bwrap

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_bwrap() is None, reason="bubblewrap is not installed"),
]
LIMITS = Limits(wall_s=2.0, cpu_s=3)


@dataclass(frozen=True)
class Attack:
    """A program and how a sandboxed run of it is expected to end."""

    name: str
    tries: str
    ends: str  # limit that ends it, "none", or "any" of these
    rlimits: str  # whether level rlimits stops it too: yes, no, partly
    program: str


def sections() -> list[tuple[list[str], str]]:
    """(words of the header, program) of every section of attacks.txt."""
    text = (Path(__file__).parent / "attacks.txt").read_text()
    parts = [part.partition("\n") for part in text.split("\n=== ")[1:]]
    return [([word.strip() for word in header.split("|")], program) for header, _, program in parts]


ATTACKS = [
    Attack(name, tries, ends, rlimits, program)
    for (kind, name, tries, ends, rlimits), program in (s for s in sections() if len(s[0]) == 5)
    if kind == "attack"
]
FORGERIES = {words[1]: program for words, program in sections() if words[0] == "forgery"}

ASSERTS = {"tests": ["assert f(2) == 4", "assert abs(f(3) - 9) < 1e-6", "assert f(5) == 25"], "entry_point": "f"}
CHECK = {
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n",
    "entry_point": "f",
}
PAIRS = {"tests": {"inputs": ["2", "3"], "outputs": ["4", "9"]}}


class Host:
    """What an attack may hit from inside, and how to see that it did."""

    def __init__(self, directory: Path) -> None:
        self.token = "covey-secret-token-4711"
        self.home = Path(os.path.expanduser("~"))
        os.environ["COVEY_TEST_TOKEN"] = self.token
        self.secret = directory / "secret.txt"
        self.secret.write_text(self.token)
        self.secret.chmod(0o644)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(self.tcp.getsockname())
        self.unix_path = str(directory / "s")
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(self.unix_path)
        self.unix.listen(1)
        os.chmod(self.unix_path, 0o777)
        self.hits: list[str] = []
        for name, listener in (("tcp", self.tcp), ("unix", self.unix)):
            threading.Thread(target=self._accept, args=(name, listener), daemon=True).start()
        self.udp.setblocking(False)

    def fill(self, program: str) -> str:
        for name, value in {"home": self.home, "secret": self.secret, "port": self.tcp.getsockname()[1]}.items():
            program = program.replace(f"{{{name}}}", str(value))
        return program.replace("{unix}", self.unix_path).replace("{token}", self.token)

    def breaches(self) -> list[str]:
        found = list(self.hits)
        try:
            self.udp.recv(16)
            found.append("udp")
        except BlockingIOError:
            pass
        if (self.home / "covey_pwned").exists():
            (self.home / "covey_pwned").unlink()
            found.append("home")
        return found

    def close(self) -> None:
        del os.environ["COVEY_TEST_TOKEN"]
        for listener in (self.tcp, self.unix):
            listener.shutdown(socket.SHUT_RDWR)  # ends the thread that waits in accept
        for one in (self.tcp, self.udp, self.unix):
            one.close()

    def _accept(self, name: str, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.close()
        self.hits.append(name)


def sandboxed_processes() -> list[str]:
    """Command lines of processes that a sandboxed run has started and that still live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text()
        except OSError:
            continue
        if "from inside.main import run" in line:
            found.append(line)
    return found


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    made = Sandbox("isolated")
    assert made.findings["process_limit"] is True
    return made


@pytest.fixture
def host() -> Iterator[Host]:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)  # only the sandbox keeps others out, not the directory's mode
        made = Host(Path(directory))
        yield made
        made.close()


def run(sandbox: Sandbox, host: Host, attack: Attack) -> Result:
    if "message" in attack.name:
        sandbox.run(host.fill(attack.program), mode="script", limits=LIMITS)
    return sandbox.run(host.fill(attack.program), mode="script", limits=LIMITS)


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
def test_attack_is_stopped(sandbox: Sandbox, host: Host, attack: Attack) -> None:
    begin = time.perf_counter()
    result = run(sandbox, host, attack)
    assert time.perf_counter() - begin < 10.0
    assert b"BREACH" not in result.output, result.output[-500:]
    assert host.token.encode() not in result.output
    assert b"SyntaxError" not in result.output
    assert b"NameError" not in result.output
    assert host.breaches() == []
    assert attack.ends == "any" or (result.limit or "none") == attack.ends, result.output[-500:]
    for _ in range(20):
        if not sandboxed_processes():
            break
        time.sleep(0.1)
    assert sandboxed_processes() == []


@pytest.mark.parametrize("row", [ASSERTS, CHECK, PAIRS], ids=["asserts", "check", "stdin"])
@pytest.mark.parametrize("name", FORGERIES)
def test_forged_pass_is_worth_nothing(name: str, row: dict[str, object]) -> None:
    options = {"limits": {"wall_s": 2.5}, "test_s": 1.0, "partial": True}
    [score] = code_reward([FORGERIES[name]], [row], options)
    assert isinstance(score, dict)
    assert score["score"] == 0.0


@pytest.mark.parametrize("attack", [a for a in ATTACKS if a.rlimits == "yes"], ids=lambda attack: attack.name)
def test_attack_that_resource_limits_stop(host: Host, attack: Attack) -> None:
    result = run(Sandbox("rlimits"), host, attack)
    assert b"BREACH" not in result.output, result.output[-500:]
    assert attack.ends == "any" or (result.limit or "none") == attack.ends, result.output[-500:]


def test_resource_limits_do_not_isolate(host: Host) -> None:
    """What the documentation says that level rlimits does not stop, it does not stop."""
    names = {"read a secret file", "TCP to loopback", "UDP", "unix socket", "list the trainer's files"}
    sandbox = Sandbox("rlimits")
    for attack in (a for a in ATTACKS if a.name in names):
        assert attack.rlimits == "no"
        assert b"BREACH" in run(sandbox, host, attack).output, attack.name


def test_the_host_would_see_a_breach(host: Host) -> None:
    """The checks from outside can fail: the same programs without a sandbox do hit the host."""
    for name in ("TCP to loopback", "unix socket", "UDP"):
        [attack] = [attack for attack in ATTACKS if attack.name == name]
        subprocess.run([sys.executable, "-c", host.fill(attack.program)], check=True, capture_output=True)
    time.sleep(0.2)
    assert sorted(host.breaches()) == ["tcp", "udp", "unix"]


def test_an_honest_program_passes(sandbox: Sandbox) -> None:
    program = "```python\ndef f(x):\n    return x * x\n```"
    main = "print(int(input()) ** 2)"
    scores = code_reward([program, program, main], [ASSERTS, CHECK, PAIRS], {})
    assert [score["score"] for score in scores if isinstance(score, dict)] == [1.0, 1.0, 1.0]


def table() -> str:
    """The attacks as Markdown, for docs/sandbox.md."""
    lines = ["| attack | tries to | isolated | rlimits |", "|---|---|---|---|"]
    for attack in ATTACKS:
        how = f"stopped ({attack.ends} limit)" if attack.ends not in ("none", "any") else "stopped"
        lines.append(f"| {attack.name} | {attack.tries} | {how} | {attack.rlimits} |")
    lines += ["", "Forged passes, each against asserts, a check function and stdin/stdout tests; all score 0:", ""]
    lines += [f"- {name}" for name in FORGERIES]
    return "\n".join(lines) + "\n"


def test_documentation_holds_the_table() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "sandbox.md").read_text()
    assert table() in text


if __name__ == "__main__":
    sys.stdout.write(table())
