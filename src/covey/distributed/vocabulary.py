"""Embedding, output head and log-probabilities cut by vocabulary: a rank never sees more than its share of the logits.

Each rank keeps rows [start, stop) of the embedding and of the head (one tensor where they are tied). Log-probabilities
and entropies are made of three numbers per token and rank, exchanged once for the whole micro-batch. With z the rank's
scaled logits, l_r their log-sum-exp, H_r the entropy of their softmax:
    l = logsumexp_r(l_r)      log p(y) = z_y - l      H = sum_r w_r (H_r - log w_r),  w_r = exp(l_r - l)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from covey.distributed.agreement import agree
from covey.distributed.mesh import ProcessGroup
from covey.distributed.pieces import Cut
from covey.distributed.tensor_parallel import TensorParallel, whole_tensor


class CutEmbedding(nn.Module):
    """Rows [start, stop) of an embedding; other ids give zeros before the sum over ranks."""

    def __init__(self, weight: nn.Parameter, start: int, tp: TensorParallel) -> None:
        super().__init__()
        self.weight = weight
        self.start = start
        self._tp = tp

    def forward(self, input_ids: Tensor) -> Tensor:
        """(1, T) -> (1, T or T / tp, D)"""
        local = input_ids - self.start
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(torch.where(mine, local, 0), self.weight)
        return self._tp.leave(rows.masked_fill(~mine.unsqueeze(-1), 0.0))


class CutHead(nn.Module):
    """Rows [start, stop) of the output head. Its weight is used through `cut_logprobs`; calls are for rollouts."""

    bias = None

    def __init__(self, weight: nn.Parameter, start: int, total: int, tp: TensorParallel) -> None:
        super().__init__()
        self.weight = weight
        self.start = start
        self._cut = Cut(1, start, total)
        self._tp = tp

    def forward(self, hidden: Tensor) -> Tensor:
        """Whole logits (rows, V) of hidden states (rows, D), on every rank; no gradient."""
        return self.gather(F.linear(hidden, self.weight))

    def gather(self, logits: Tensor) -> Tensor:
        """(rows, V) from every rank's (rows, V / tp); no gradient."""
        return whole_tensor(logits, self._cut, self._tp.group)


def cut_vocabulary(model: Any, tp: TensorParallel) -> None:
    """Cut a Hugging Face model's embedding and head in place; tied ones stay tied."""
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    total = embedding.weight.shape[0]
    start, stop = tp.bounds(total)

    def part(module: Any) -> nn.Parameter:
        tp.cuts[f"{names[id(module)]}.weight"] = Cut(0, start, total)
        return nn.Parameter(module.weight.detach()[start:stop].clone(), requires_grad=module.weight.requires_grad)

    weight = part(embedding)
    model.set_input_embeddings(CutEmbedding(weight, start, tp))
    head_weight = part(head) if not tied else weight
    if tied:
        tp.cuts[f"{names[id(head)]}.weight"] = Cut(0, start, total)
    model.set_output_embeddings(CutHead(head_weight, start, total, tp))


def cut_logprobs(
    hidden: Tensor,  # (n, D), whole on every rank; its gradient is this rank's share
    weight: Tensor,  # (V / tp, D)
    targets: Tensor,  # (n,) int64, ids of the whole vocabulary
    *,
    start: int,
    group: ProcessGroup,
    temperature: float,
    rows_per_chunk: int,
) -> tuple[Tensor, Tensor]:
    """(log p(target), entropy), both (n,) fp32, as `covey.algorithm.logprobs.logprobs_and_entropy` over all ranks."""
    return _CutHead.apply(hidden, weight, targets, start, group, 1.0 / temperature, rows_per_chunk)  # type: ignore[return-value]


def _logits(hidden: Tensor, weight: Tensor, inverse_temperature: float) -> Tensor:
    logits = torch.mm(hidden, weight.t()).float()
    return logits if inverse_temperature == 1.0 else logits.mul_(inverse_temperature)


class _CutHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        start: int,
        group: ProcessGroup,
        inverse_temperature: float,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        n = hidden.shape[0]
        local = targets - start
        mine = (local >= 0) & (local < weight.shape[0])
        local = torch.where(mine, local, 0)
        parts = torch.zeros(3, n, dtype=torch.float32, device=hidden.device)  # l_r, H_r, z_y where the rank has y
        for i in range(0, n, rows):
            chunk = slice(i, i + rows)
            logits = _logits(hidden[chunk], weight, inverse_temperature)
            parts[0, chunk] = torch.logsumexp(logits, -1)
            parts[2, chunk] = logits.gather(1, local[chunk, None]).squeeze(1) * mine[chunk]
            logits.sub_(parts[0, chunk, None])
            parts[1, chunk] = logits.exp().mul_(logits).sum(-1).neg_()
        gathered = [torch.empty_like(parts) for _ in range(dist.get_world_size(group))]
        agree("gathering", parts, group, what="log-probabilities over a cut vocabulary")
        dist.all_gather(gathered, parts, group=group)
        each = torch.stack(gathered)  # (ranks, 3, n)
        log_normalizer = torch.logsumexp(each[:, 0], 0)
        log_share = each[:, 0] - log_normalizer
        entropy = (log_share.exp() * (each[:, 1] - log_share)).sum(0)
        ctx.save_for_backward(hidden, weight, local, mine, log_normalizer, entropy)
        ctx.inverse_temperature, ctx.rows = inverse_temperature, rows
        ctx.set_materialize_grads(False)
        return each[:, 2].sum(0) - log_normalizer, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, local, mine, log_normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for i in range(0, hidden.shape[0], ctx.rows):
            chunk = slice(i, i + ctx.rows)
            logp = _logits(hidden[chunk], weight, ctx.inverse_temperature).sub_(log_normalizer[chunk, None])
            probabilities = logp.exp()
            grad = torch.zeros_like(logp)
            if grad_entropy is not None:
                grad = logp.add_(entropy[chunk, None]).mul_(probabilities).mul_(-grad_entropy[chunk, None])
            if grad_logprobs is not None:
                grad.addcmul_(probabilities, grad_logprobs[chunk, None], value=-1.0)
                grad.scatter_add_(1, local[chunk, None], (grad_logprobs[chunk] * mine[chunk])[:, None])
            grad = grad.mul_(ctx.inverse_temperature).to(weight.dtype)
            torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                grad_weight.add_(torch.mm(grad.t(), hidden[chunk]))
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None, None
