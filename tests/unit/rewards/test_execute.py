"""Loading a reward function before any time limit runs."""

from __future__ import annotations

import subprocess
import sys


def test_slow_imports_are_done_before_the_first_time_limit_starts() -> None:
    program = (
        "import sys\n"
        "from covey.rewards.execute import FunctionSpec, load\n"
        "from covey.rewards.base import REWARDS\n"
        "load(FunctionSpec(name=sys.argv[1], label='x', options={}, timeout_s=1.0))\n"
        "before = set(sys.modules)\n"
        "from covey.rewards.algebra import same_answer\n"
        "assert same_answer('\\\\frac{2}{4}', 'x-x+1/2')\n"
        "print(sum(name.split('.')[0] in ('sympy', 'math_verify') for name in set(sys.modules) - before))\n"
    )
    late = [
        int(subprocess.run([sys.executable, "-c", program, name], check=True, capture_output=True, text=True).stdout)
        for name in ("math", "format")
    ]
    assert late[0] < 20  # stray submodules
    assert late[1] > 200  # what `math` has behind it, and `format` never needs
