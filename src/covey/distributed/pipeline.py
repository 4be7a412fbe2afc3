"""A pipeline's run: micro-batches through the chunks of layers of several ranks, hidden states forward, gradients back.

Why not torch.distributed.pipelining: a schedule there has one shape of activations for all of its micro-batches (its
stages infer it once and allocate every receive buffer from it), and packed micro-batches are all of different lengths.
Padding each to the longest of the step would cost what packing saves. Here all ranks of a pipeline know its
micro-batches, so every buffer has its own length and nothing about shapes is exchanged.

The order (pipeline_order.py) fixes what is sent from one rank to another and when; the receiver posts its buffers in
that order, one ahead of need. Sends to a later and to an earlier rank use a group of processes each: NCCL and HCCL run
all transfers between two ranks of one group one after the other, and the two directions must not wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from covey.distributed.collectives import failed
from covey.distributed.mesh import Mesh
from covey.distributed.pipeline_order import Action, forward_orders, orders

# (chunk, micro-batch, input or None in chunk 0) -> output; of the last chunk: the micro-batch's loss, if one is wanted.
Forward = Callable[[int, int, Tensor | None], Tensor | None]
# (chunk, output, its gradient or None for a loss, whether it is the chunk's last micro-batch): adds gradients
Backward = Callable[[int, Tensor, Tensor | None, bool], None]


class Pipeline:
    """The chunks of one model over the pipeline ranks of a mesh; `run` is called on all of them."""

    def __init__(
        self, mesh: Mesh, *, chunks_per_rank: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """width, dtype: of the hidden states between chunks."""
        self.num_chunks = mesh.pp * chunks_per_rank
        self._mesh = mesh
        self._chunks_per_rank = chunks_per_rank
        self._width, self._dtype, self._device = width, dtype, device

    def run(self, lengths: Sequence[int], forward: Forward, backward: Backward | None = None) -> None:
        """Every micro-batch through every chunk of this rank; without `backward`, forwards only.

        lengths: tokens of each micro-batch's hidden states on this rank.
        """
        num_ranks = self._mesh.pp
        make = forward_orders if backward is None else orders
        order = make(len(lengths), num_ranks, self._chunks_per_rank)
        mine = order[self._mesh.pp_rank]
        inbox = _Inbox(self, order, lengths)
        outbox = _Outbox(self)
        last_micro = len(lengths) - 1
        kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # (chunk, micro-batch) -> input, output
        for i, action in enumerate(mine):
            received = inbox.take(action, ahead=mine[i + 1 : i + 2])
            at = (action.chunk, action.micro)
            if action.kind == "forward":
                if received is not None and backward is not None:
                    received.requires_grad_()
                output = forward(*at, received)
                if output is not None:
                    outbox.send(action, output)
                    if backward is not None:
                        kept[at] = received, output
            else:
                assert backward is not None
                given, output = kept.pop(at)
                backward(action.chunk, output, received, action.micro == last_micro)
                if given is not None:
                    assert given.grad is not None
                    outbox.send(action, given.grad)
        outbox.wait()

    def rank_of(self, action: Action) -> int:
        """The pipeline rank that runs an action."""
        return action.chunk % self._mesh.pp

    def group(self, source: int, target: int) -> Any:
        """The processes' group for transfers between two pipeline ranks."""
        return self._mesh.pp_group if source < target else self._mesh.pp_falling_group

    def attempt(self, exchange: Callable[[], Any], *, what: str) -> Any:
        """`exchange()`; CollectiveError that names it when it fails."""
        try:
            return exchange()
        except RuntimeError as error:
            raise failed(what, self._mesh.pp_group, error) from error

    @property
    def rank(self) -> int:
        """This rank's place in the pipeline."""
        return self._mesh.pp_rank

    def buffer(self, num_tokens: int) -> Tensor:
        """Room for a micro-batch's hidden states, (1, T, D)."""
        return torch.empty(1, num_tokens, self._width, dtype=self._dtype, device=self._device)


class _Inbox:
    """What the other ranks send here, in their order."""

    def __init__(self, pipeline: Pipeline, order: Sequence[Sequence[Action]], lengths: Sequence[int]) -> None:
        self._pipeline = pipeline
        self._lengths = lengths
        self._coming: dict[int, deque[Action]] = {}  # by sender: my actions that its next transfers are for
        for sender, actions in enumerate(order):
            fed = (action.feeds(pipeline.num_chunks) for action in actions)
            mine = [action for action in fed if action is not None and pipeline.rank_of(action) == pipeline.rank]
            self._coming[sender] = deque(mine)
        self._posted: dict[Action, tuple[Any, Tensor]] = {}

    def take(self, action: Action, *, ahead: Sequence[Action]) -> Tensor | None:
        """What `action` needs from another rank, when it is there; buffers for `ahead` are posted before waiting."""
        for one in (action, *ahead):
            self._post_until(one)
        if action not in self._posted:
            return None
        work, buffer = self._posted.pop(action)
        self._pipeline.attempt(work.wait, what=f"{action.kind} of the pipeline")
        return buffer

    def _post_until(self, action: Action) -> None:
        made_by = action.takes(self._pipeline.num_chunks)
        if made_by is None:
            return
        source = self._pipeline.rank_of(made_by)
        while action not in self._posted:
            coming = self._coming[source].popleft()
            buffer = self._pipeline.buffer(self._lengths[coming.micro])
            receive = partial(
                dist.irecv, buffer, group_src=source, group=self._pipeline.group(source, self._pipeline.rank)
            )
            work = self._pipeline.attempt(receive, what=f"{action.kind} of the pipeline")
            self._posted[coming] = work, buffer


class _Outbox:
    """What this rank sends; tensors stay until they have left."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start sending what `action` made to the rank that needs it, if there is one."""
        taker = action.feeds(self._pipeline.num_chunks)
        if taker is None:
            return
        # gloo reports what has left only when waited for, so on CPU all of it stays until the end of the run.
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        target = self._pipeline.rank_of(taker)
        tensor = tensor.detach().contiguous()
        send = partial(dist.isend, tensor, group_dst=target, group=self._pipeline.group(self._pipeline.rank, target))
        self._sent.append((self._pipeline.attempt(send, what=f"{action.kind} of the pipeline"), tensor))

    def wait(self) -> None:
        """Return when everything has left."""
        for work, _ in self._sent:
            self._pipeline.attempt(work.wait, what="last transfers of the pipeline")
        self._sent.clear()
