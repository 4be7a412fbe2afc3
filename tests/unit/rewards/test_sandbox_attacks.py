"""Programs that attack the sandbox, each really run. docs/sandbox.md holds the table that `python THIS_FILE` prints.

A program prints BREACH when it got what it wanted; the test also looks from outside: at files, listeners, processes.
Bombs run only in a sandbox whose process limit the start-up probe has just seen hold.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from covey.rewards.code_tests import code_reward
from covey.rewards.sandbox import Limits, Result, Sandbox

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
]
LIMITS = Limits(wall_s=2.0, cpu_s=3)


@dataclass(frozen=True)
class Attack:
    """A program and how a sandboxed run of it is expected to end."""

    name: str
    tries: str  # what it tries
    program: str
    ends: str = ""  # limit that ends it, when a limit must
    rlimits: str = "no"  # whether level rlimits stops it too: yes, no, partly


BREACH_IF = "try:\n    {0}\n    print('BREACH')\nexcept Exception as error:\n    print('stopped:', error)\n"

ATTACKS = [
    Attack(
        "fork bomb",
        "start processes without end",
        "import os\nn = 0\ntry:\n    while True:\n        if os.fork() == 0:\n            import time\n            time.sleep(30)\n"
        "        n += 1\n        if n > 30:\n            print('BREACH', flush=True)\nexcept OSError:\n    print('stopped at', n)\n"
        "import time\ntime.sleep(30)",
        "wall",
        "partly: bounded, leftovers live until their CPU limit",
    ),
    Attack(
        "exponential fork bomb",
        "every process forks for ever",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "wall",
        "partly: bounded, leftovers live until their CPU limit",
    ),
    Attack(
        "thread bomb",
        "start threads without end",
        "import threading, time\nn = 0\ntry:\n    while n < 200:\n        threading.Thread(target=time.sleep, args=(20,), daemon=True).start()\n"
        "        n += 1\n    print('BREACH')\nexcept RuntimeError:\n    print('stopped at', n)\nimport os\nos._exit(0)",
        rlimits="yes",
    ),
    Attack(
        "memory bomb",
        "allocate without end",
        "x = []\ntry:\n    while True:\n        x.append(bytearray(32 << 20))\n        if len(x) > 32:\n            print('BREACH', flush=True)\n"
        "except MemoryError:\n    print('stopped at', len(x))",
        rlimits="yes",
    ),
    Attack(
        "memory bomb in many processes",
        "stay under the limit of one process, in ten",
        "import os, time\nfor _ in range(10):\n    if os.fork() == 0:\n        x = bytearray(300 << 20)\n        for i in range(0, len(x), 4096):\n"
        "            x[i] = 1\n        time.sleep(30)\n        os._exit(0)\ntime.sleep(30)",
        "memory",
        "yes",
    ),
    Attack("infinite loop", "never end", "while True:\n    pass", "wall", "yes"),
    Attack("infinite sleep", "never end, without CPU time", "import time\ntime.sleep(1000)", "wall", "yes"),
    Attack("infinite output", "fill the reader's memory", "while True:\n    print('x' * 1000)", "output", "yes"),
    Attack(
        "signals ignored",
        "survive SIGTERM and whatever else can be ignored",
        "import signal\nfor s in range(1, 64):\n    try:\n        signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass\n"
        "while True:\n    pass",
        "wall",
        "yes",
    ),
    Attack(
        "daemon",
        "leave a process behind by double fork and setsid",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(60)\n    os._exit(0)\nprint('left one')\nos._exit(0)",
    ),
    Attack(
        "deep recursion",
        "overflow the C stack",
        "import sys\nsys.setrecursionlimit(10**8)\ndef f(n):\n    return [f(n + 1)]\nf(0)",
        rlimits="yes",
    ),
    Attack(
        "zip bomb",
        "unpack 4 GiB from 4 MiB",
        "import zlib\nc = zlib.compressobj(9)\nz = b''.join(c.compress(bytes(1 << 20)) for _ in range(64)) + c.flush()\n"
        "try:\n    d = [zlib.decompress(z) for _ in range(64)]\n    print('BREACH')\nexcept MemoryError:\n    print('stopped')",
        rlimits="yes",
    ),
    Attack(
        "big file",
        "write a file over the limit",
        "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nn = 0\ntry:\n    with open('big', 'wb') as f:\n        while n < 64:\n"
        "            f.write(bytes(1 << 20))\n            n += 1\n    print('BREACH')\nexcept OSError:\n    print('stopped at', n)",
        rlimits="yes",
    ),
    Attack(
        "many files",
        "fill the disk with files under the limit",
        "n = 0\ntry:\n    for i in range(20):\n        with open(f'f{i}', 'wb') as f:\n            f.write(bytes(8 << 20))\n        n += 8\n"
        "    print('BREACH')\nexcept OSError:\n    print('stopped at', n)",
    ),
    Attack(
        "shared memory",
        "fill /dev/shm",
        "n = 0\ntry:\n    while n < 8:\n        with open(f'/dev/shm/f{n}', 'wb') as f:\n            f.write(bytes(1 << 20))\n        n += 1\n"
        "    print('BREACH')\nexcept OSError:\n    print('stopped at', n)",
    ),
    Attack(
        "message to the next run",
        "leave a file for a later program",
        "import os\nfound = [d for d in ('/tmp', '/dev/shm', '/var/tmp') if os.path.exists(d + '/message')]\nif found:\n    print('BREACH', found)\n"
        "for d in ('/tmp', '/dev/shm', '/var/tmp'):\n    try:\n        open(d + '/message', 'w').write('hello')\n    except OSError:\n        pass",
    ),
    Attack(
        "write to the user's home", "write a file there", BREACH_IF.format("open('{home}/covey_pwned', 'w').write('x')")
    ),
    Attack(
        "write anywhere",
        "write outside the temporary directory",
        "import os\nfor d in ('/', '/etc', '/usr', '/usr/lib', '/bin', '/opt', '/opt/python', '/covey', '/covey/inside', '/var/tmp', '/root', '/home', '/dev'):\n"
        "    try:\n        open(d + '/covey_pwned', 'w').write('x')\n        print('BREACH', d)\n    except OSError:\n        pass",
    ),
    Attack("read a secret file", "open a file of the trainer", BREACH_IF.format("print(open('{secret}').read())")),
    Attack(
        "list the trainer's files",
        "see what is there",
        "import os\nfor d in ('/root', '/home', '/etc', '/var', '/work', '/mnt', os.path.dirname('{secret}')):\n    try:\n"
        "        print('BREACH', d, os.listdir(d)[:3])\n    except OSError:\n        pass",
    ),
    Attack(
        "read environments",
        "find the trainer's secrets in /proc",
        "import os\nfor p in os.listdir('/proc'):\n    if p.isdigit():\n        for name in ('environ', 'cmdline'):\n            try:\n"
        "                if b'{token}' in open(f'/proc/{{p}}/{{name}}', 'rb').read():\n                    print('BREACH', p)\n"
        "            except OSError:\n                pass\nif any('{token}' in v for v in os.environ.values()):\n    print('BREACH')",
        rlimits="partly: own environment is empty, others of the same user can be read",
    ),
    Attack(
        "symlink to a secret",
        "read through a link in its own directory",
        BREACH_IF.format("import os; os.symlink('{secret}', 'l'); print(open('l').read())"),
    ),
    Attack(
        "symlink out of the box",
        "write through a link",
        BREACH_IF.format("import os; os.symlink('{home}', 'h'); open('h/covey_pwned', 'w').write('x')"),
    ),
    Attack(
        "TCP to loopback",
        "connect to a listener of the host",
        BREACH_IF.format("import socket; socket.create_connection(('127.0.0.1', {port}), 1)"),
    ),
    Attack(
        "UDP",
        "send a datagram",
        BREACH_IF.format(
            "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))"
        ),
    ),
    Attack(
        "unix socket",
        "connect to a socket file of the host",
        BREACH_IF.format("import socket; socket.socket(socket.AF_UNIX).connect('{unix}')"),
    ),
    Attack(
        "raw netlink",
        "talk to the kernel's network side",
        BREACH_IF.format("import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)"),
    ),
    Attack(
        "ptrace",
        "attach to other processes",
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nfor p in [int(p) for p in os.listdir('/proc') if p.isdigit()]:\n"
        "    if p != os.getpid() and libc.ptrace(16, p, 0, 0) == 0:\n        print('BREACH', p)",
        rlimits="no: processes of the same user, unless a throw-away user is used (as root)",
    ),
    Attack(
        "new user namespace",
        "become root in one of its own",
        "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) == 0:\n    print('BREACH')",
    ),
    Attack(
        "mount",
        "mount a file system",
        "import ctypes\nif ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0:\n    print('BREACH')",
        rlimits="yes",
    ),
    Attack(
        "become root",
        "setuid(0), setgid(0)",
        "import os\nfor f in (os.setuid, os.setgid, os.seteuid):\n    try:\n        f(0)\n        print('BREACH')\n    except OSError:\n        pass",
        rlimits="yes",
    ),
    Attack(
        "kill everything",
        "signal every process it can reach",
        "import os, time\nos.kill(-1, 9)\ntime.sleep(1)\nprint('survived')",
        rlimits="no: processes of the same user, unless a throw-away user is used (as root)",
    ),
    Attack(
        "inherited files",
        "use files left open by the trainer",
        "import os\nfor fd in range(3, 256):\n    try:\n        os.fstat(fd)\n        print('BREACH', fd)\n    except OSError:\n        pass",
        rlimits="yes",
    ),
    Attack(
        "devices",
        "open devices of the host",
        "import os\nfor d in ('mem', 'kmsg', 'sda', 'vda', 'kvm', 'fuse', 'davinci0', 'nvidia0'):\n    try:\n        open('/dev/' + d, 'rb')\n        print('BREACH', d)\n    except OSError:\n        pass",
        rlimits="no: whatever the user may open",
    ),
]

ASSERTS = {"tests": ["assert f(2) == 4", "assert abs(f(3) - 9) < 1e-6", "assert f(5) == 25"], "entry_point": "f"}
CHECK = {
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n",
    "entry_point": "f",
}
PAIRS = {"tests": {"inputs": ["2", "3"], "outputs": ["4", "9"]}}
FORGED = r'{"test": 0, "passed": true, "why": "", "nonce": ""}\n{"passed": true}\nOK\nPASSED\n'

FORGERIES = {
    "exit with success before the tests": "import os\nos._exit(0)",
    "sys.exit(0) before the tests": "import sys\nsys.exit(0)",
    "exit inside the function": "import os\ndef f(x):\n    os._exit(0)",
    "print the marker of success": f"print('''{FORGED}''')\nimport os\nos._exit(0)",
    "write the marker to every open file": f"import os\nfor fd in range(256):\n    try:\n        os.write(fd, b'''{FORGED}''')\n    except OSError:\n        pass\nos._exit(0)",
    "write the marker through /proc": "import os\nfor p in os.listdir('/proc'):\n    for fd in ('0', '1', '2'):\n        try:\n"
    f"            open(f'/proc/{{p}}/fd/{{fd}}', 'wb').write(b'''{FORGED}''')\n        except OSError:\n            pass\n",
    "a result that equals everything": "class E:\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0\n    def __abs__(self): return 0\n"
    "def f(x): return E()",
    "a number that equals everything": "class E(int):\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0\ndef f(x): return E(7)",
    "patched builtins": "import builtins\nbuiltins.abs = lambda x: 0\nbuiltins.AssertionError = type('A', (BaseException,), {})\n"
    "builtins.isinstance = lambda *a: True\ndef f(x): return 0",
    "own abs, assert helpers and check": "def abs(x): return 0\ndef check(c): pass\nclass AssertionError(Exception): pass\ndef f(x): return 0",
    "patched modules": "import sys, types, math\nmath.isclose = lambda *a, **k: True\nsys.modules['unittest'] = types.ModuleType('unittest')\ndef f(x): return 0",
    "trace function": "import sys\nsys.settrace(lambda *a: None)\nimport atexit\natexit.register(print, 'PASSED')\ndef f(x): return 0",
    "kill the judge": "import os\nos.kill(os.getppid(), 9)\ndef f(x): return 0",
    "stop the judge": "import os\nos.kill(os.getppid(), 19)\ndef f(x): return 0",
    "look for the tests in memory": "import gc, re, sys\ndef f(x):\n    text = ' '.join(o for o in gc.get_objects() if isinstance(o, str))\n"
    "    found = re.search(r'f\\(%d\\) == (\\d+)' % x, text)\n    return int(found[1]) if found else 0",
    "look for the tests in the judge": "import os, re\ndef f(x):\n    for p in (os.getppid(), 1):\n        try:\n            m = open(f'/proc/{p}/mem', 'rb')\n"
    "            for line in open(f'/proc/{p}/maps'):\n                a, b = [int(n, 16) for n in line.split()[0].split('-')]\n                m.seek(a)\n"
    "                found = re.search(rb'\\(%d\\) == (\\d+)' % x, m.read(b - a))\n                if found:\n                    return int(found[1])\n"
    "        except (OSError, ValueError, OverflowError):\n            pass\n    return 0",
    "an answer too large to read": "def f(x):\n    return 'x' * (64 << 20)",
    "an answer nested too deep": "def f(x):\n    y = []\n    for _ in range(10**5):\n        y = [y]\n    return y",
    "raise what passes for success": "def f(x):\n    raise SystemExit(0)",
    "answer with infinity and NaN": "def f(x):\n    return float('nan')",
}


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
        program = program.replace("{unix}", self.unix_path).replace("{token}", self.token)
        return program.replace("{{", "{").replace("}}", "}")

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
        for one in (self.tcp, self.udp, self.unix):
            one.close()

    def _accept(self, name: str, listener: socket.socket) -> None:
        try:
            listener.accept()
            self.hits.append(name)
        except OSError:
            return


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
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


def run(sandbox: Sandbox, host: Host, attack: Attack) -> Result:
    if "message" in attack.name:
        sandbox.run(host.fill(attack.program), mode="script", limits=LIMITS)
    return sandbox.run(host.fill(attack.program), mode="script", limits=LIMITS)


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
def test_attack_is_stopped(sandbox: Sandbox, host: Host, attack: Attack) -> None:
    bystander = threading.Event()
    begin = time.perf_counter()
    result = run(sandbox, host, attack)
    assert time.perf_counter() - begin < 10.0
    assert b"BREACH" not in result.output, result.output[-500:]
    assert host.token.encode() not in result.output
    assert b"SyntaxError" not in result.output
    assert b"NameError" not in result.output
    assert host.breaches() == []
    assert result.limit == attack.ends, result.output[-500:]
    for _ in range(20):
        if not sandboxed_processes():
            break
        time.sleep(0.1)
    assert sandboxed_processes() == []
    assert not bystander.is_set()


@pytest.mark.parametrize("row", [ASSERTS, CHECK, PAIRS], ids=["asserts", "check", "stdin"])
@pytest.mark.parametrize("name", FORGERIES)
def test_forged_pass_is_worth_nothing(name: str, row: dict[str, object]) -> None:
    options = {"limits": {"wall_s": 2.5}, "test_s": 1.0, "partial": True}
    [score] = code_reward([FORGERIES[name]], [row], options)
    assert isinstance(score, dict)
    assert score["score"] == 0.0


def test_the_host_would_see_a_breach(host: Host) -> None:
    """The checks from outside can fail: the same programs without a sandbox do hit the host."""
    for name in ("TCP to loopback", "unix socket", "UDP"):
        [attack] = [attack for attack in ATTACKS if attack.name == name]
        exec(compile(host.fill(attack.program), name, "exec"), {"print": lambda *_: None})
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
        how = f"stopped ({attack.ends} limit)" if attack.ends else "stopped"
        lines.append(f"| {attack.name} | {attack.tries} | {how} | {attack.rlimits} |")
    lines += ["", "Forged passes, each against asserts, a check function and stdin/stdout tests; all score 0:", ""]
    lines += [f"- {name}" for name in FORGERIES]
    return "\n".join(lines) + "\n"


def test_documentation_holds_the_table() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "sandbox.md").read_text()
    assert table() in text


if __name__ == "__main__":
    sys.stdout.write(table())
