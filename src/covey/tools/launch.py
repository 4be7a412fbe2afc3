"""`covey launch`: start a training on several processes of this host through torchrun.

The same as `torchrun --standalone --nproc-per-node N -m covey train FILE ...`; over several hosts call torchrun on each
of them. When a process dies, torchrun ends the others (SIGTERM, after 30 s SIGKILL) and reports the first failure; with
restarts it starts all of them again, and the run goes on from its newest checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def run(num_processes: int, arguments: Sequence[str], *, max_restarts: int = 0) -> int:
    """Run `covey ARGUMENTS` in `num_processes` processes; returns torchrun's exit code, 0 when all succeeded."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(num_processes), "--max-restarts", str(max_restarts)),
        *("-m", "covey", *arguments),
    ]
    # torchrun would set this itself and print a banner about it.
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_processes))} | os.environ
    process = subprocess.Popen(command, env=environment)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # the terminal sent Ctrl-C to the processes too: they write their checkpoint, then end
