"""Debug mode's check before ranks exchange anything: do all mean the same exchange, and are all of them there?

Every rank writes what it is about to do (operation, numbers, shape, what for) into the store of the processes, and
reads what the others wrote. Ranks that mean different things, which would hang or mix up numbers, all raise with all
texts. A rank that does not come within the time limit is named, with the exchange that it was in last. The store needs
no collective, so nothing here can hang.

Left out: the exchanges inside FSDP2 (gathering weights, reducing gradients), and messages between pipeline stages.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

if TYPE_CHECKING:
    from covey.distributed.mesh import ProcessGroup


class CollectiveError(RuntimeError):
    """An exchange did not complete, or would not have: a rank died, did not arrive in time, or meant another one."""


def agree(operation: str, tensor: Tensor | None, group: ProcessGroup, *, what: str) -> None:
    """Return when all members of `group` are about to do the same; nothing happens outside debug mode.

    tensor: what every member has with the same type and shape; None: objects of any size.
    """
    if _checker is not None and group is not None:
        form = "objects" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        _checker.check(f"{operation} of {form} in {what!r}", group)


def start_checking(store: Any, *, rank: int, timeout_s: float) -> None:
    """Check every exchange of this process from now on, over `store` (torch.distributed.Store of all processes)."""
    global _checker
    _checker = _Checker(PrefixStore("covey_debug", store), rank, timeout_s)


def stop_checking() -> None:
    """No more checks."""
    global _checker
    _checker = None


class _Checker:
    def __init__(self, store: Any, rank: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()  # checkpoints are written from a thread of their own, in a group of their own

    def check(self, mine: str, group: Any) -> None:
        name, ranks = group.group_name, dist.get_process_group_ranks(group)
        with self._lock:
            number = self._counts[name] = self._counts.get(name, 0) + 1
        keys = {rank: f"{name}/{number}/{rank}" for rank in ranks}
        try:
            self._store.set(f"last/{self._rank}", f"{mine} (number {number} of ranks {ranks})")
            self._store.set(keys[self._rank], mine)
            missing = self._wait(keys)
            if missing:
                raise CollectiveError(self._absent(mine, number, ranks, missing))
            said = {rank: self._store.get(key).decode() for rank, key in keys.items()}
            if number > 1:  # whoever is here has read the exchange before
                self._store.delete_key(f"{name}/{number - 1}/{self._rank}")
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            first = str(error).strip().splitlines()[0]
            raise CollectiveError(
                f"rank {self._rank} is at {mine}, exchange {number} of ranks {ranks}, and the store of the processes "
                f"does not answer ({first}): the process that keeps it has ended, its own message is the first cause"
            ) from error
        if len(set(said.values())) > 1:
            each = "; ".join(f"rank {rank}: {text}" for rank, text in said.items())
            raise CollectiveError(f"ranks {ranks} do not mean the same in exchange {number} of their group: {each}")

    def _wait(self, keys: dict[int, str]) -> list[int]:
        """Ranks that did not come in time. Asks again and again, because a waiting store blocks other threads."""
        end, pause = time.monotonic() + self._timeout_s, 0.0005
        missing = list(keys)
        while missing := [rank for rank in missing if not self._store.check([keys[rank]])]:
            if time.monotonic() > end:
                return missing
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return []

    def _absent(self, mine: str, number: int, ranks: list[int], missing: list[int]) -> str:
        def last(rank: int) -> str:
            key = f"last/{rank}"
            return f"rank {rank} was last at {self._store.get(key).decode()}" if self._store.check([key]) else (
                f"rank {rank} never came to an exchange"
            )  # fmt: skip

        return (
            f"rank {self._rank} is at {mine}, exchange {number} of ranks {ranks}, but ranks {missing} did not come "
            f"within parallel.timeout_s={self._timeout_s:g}: {'; '.join(map(last, missing))}"
        )


_checker: _Checker | None = None


def make_store(timeout_s: float) -> tuple[Any, int, int]:
    """(store, rank, world size) of the processes that torchrun started."""
    store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return store, rank, world
