"""Few and named exchanges between ranks: sums of statistics, objects, a flag. A group of None has one member.

Objects and dictionaries travel over gloo, as pickles between processes of one run; sums of dictionaries are made in
float64 on every rank in rank order, so that all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from covey.distributed.agreement import CollectiveError, agree

if TYPE_CHECKING:
    from covey.distributed.mesh import ProcessGroup

T = TypeVar("T")


def gather_objects(value: T, group: ProcessGroup, *, what: str) -> list[T]:
    """Every member's `value`, in rank order, on every member. `what` names the exchange in the error."""
    if group is None:
        return [value]
    agree("gathering", None, group, what=what)
    out: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(out, value, group=group)
    except RuntimeError as error:
        raise failed(what, group, error) from error
    return out


def sum_dicts(values: Mapping[str, float], group: ProcessGroup, *, what: str) -> dict[str, float]:
    """Sum of every name over the members; a name that a member lacks counts 0 there."""
    total: dict[str, float] = {}
    for part in gather_objects(dict(values), group, what=what):
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def max_dicts(values: Mapping[str, float], group: ProcessGroup, *, what: str) -> dict[str, float]:
    """Largest value of every name over the members."""
    largest: dict[str, float] = {}
    for part in gather_objects(dict(values), group, what=what):
        for name, value in part.items():
            largest[name] = max(largest.get(name, value), value)
    return largest


def sum_tensor(tensor: Tensor, group: ProcessGroup, *, what: str) -> Tensor:
    """`tensor` summed over the members, in place."""
    if group is not None:
        agree("sum", tensor, group, what=what)
        try:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
        except RuntimeError as error:
            raise failed(what, group, error) from error
    return tensor


def send_to_all(tensor: Tensor, source: int, group: ProcessGroup, *, what: str) -> Tensor:
    """The tensor of the member `source` (its place in the group), into `tensor` of every other."""
    if group is not None:
        agree(f"sending from member {source}", tensor, group, what=what)
        try:
            dist.broadcast(tensor, group_src=source, group=group)
        except RuntimeError as error:
            raise failed(what, group, error) from error
    return tensor


def any_true(flag: bool, group: ProcessGroup, *, what: str) -> bool:
    """Whether the flag is set on any member."""
    return any(gather_objects(flag, group, what=what))


def wait_for_all(group: ProcessGroup, *, what: str) -> None:
    """Return when every member has arrived here."""
    gather_objects(None, group, what=what)


def failed(what: str, group: ProcessGroup, error: RuntimeError) -> CollectiveError:
    """The error for an exchange `what` of `group` that ended with `error`."""
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    ranks = dist.get_process_group_ranks(group)
    return CollectiveError(
        f"rank {dist.get_rank()} waited for ranks {ranks} in {what!r}, which did not complete: {first}. One of them "
        "died or is slower than parallel.timeout_s; its own message is the first cause"
    )
