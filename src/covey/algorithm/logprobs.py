"""Log-probabilities and entropies of chosen tokens from hidden states, without ever holding all logits.

The head's matrix product runs in the weights' dtype, everything after it in fp32, in chunks of equally many rows. The
backward pass recomputes each chunk, but for the last one, whose probabilities are still there. Peak memory is two
chunks, whatever tokens x vocabulary. Gradients, with z the logits divided by the temperature, p = softmax(z), H the
entropy:
    d logp_y / d z = onehot(y) - p          d H / d z_j = -p_j (log p_j + H)

`num_kept` restricts both to the likeliest tokens, as a sampler with top-k, top-p or min-p did: the softmax is over the
num_kept largest logits of the row, and always over the target.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def chunk_rows(vocab_size: int, chunk_bytes: int) -> int:
    """Rows of fp32 logits that fit in `chunk_bytes`, at least one."""
    return max(1, chunk_bytes // (4 * vocab_size))


def logprobs_and_entropy(
    hidden: Tensor,  # (n, D)
    weight: Tensor,  # (V, D), the output head
    targets: Tensor,  # (n,) int64
    *,
    temperature: float = 1.0,
    rows_per_chunk: int,
    add_to_grad: bool = False,
    num_kept: Tensor | None = None,  # (n,) int64; None: the whole vocabulary
) -> tuple[Tensor, Tensor]:
    """(log p(target), entropy) in nats, both (n,) fp32, of softmax(hidden @ weight.T / temperature).

    add_to_grad: backward() adds the head's gradient to `weight.grad` chunk by chunk and returns none for it, which
    saves a temporary of the weight's size. Only for an fp32 leaf whose gradient nobody else waits for (no FSDP, no
    hooks).
    """
    if add_to_grad and not (weight.is_leaf and weight.dtype == torch.float32):
        raise ValueError("add_to_grad needs an fp32 leaf tensor")
    num_chunks = max(1, -(-len(targets) // rows_per_chunk))
    rows = max(1, -(-len(targets) // num_chunks))
    scale = 1.0 / temperature
    return _ChunkedHead.apply(hidden, weight, targets, scale, rows, add_to_grad, num_kept)  # type: ignore[return-value]


def _logits(hidden: Tensor, weight: Tensor, scale: float, buffer: Tensor) -> Tensor:
    """Scaled fp32 logits of a chunk, in the first rows of the buffer: fresh memory costs more than the arithmetic."""
    logits = buffer[: len(hidden)]
    if weight.dtype == torch.float32:
        torch.mm(hidden, weight.t(), out=logits)
    else:
        logits.copy_(torch.mm(hidden, weight.t()))
    return logits if scale == 1.0 else logits.mul_(scale)


def _drop_filtered(logits: Tensor, targets: Tensor, num_kept: Tensor) -> Tensor:
    """Give all but the kept tokens a logit whose probability is 0; the target is always kept."""
    largest = logits.topk(min(int(num_kept.max()), logits.shape[1]), dim=-1).values
    threshold = largest.gather(1, (num_kept - 1).clamp(max=largest.shape[1] - 1)[:, None])
    dropped = (logits < threshold).scatter_(1, targets[:, None], False)
    return logits.masked_fill_(dropped, _NEVER)


_NEVER = -1e30  # finite, so that probability x log-probability is 0 and not NaN


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float,
        rows: int,
        add_to_grad: bool,
        num_kept: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        n = hidden.shape[0]
        logprobs, entropy, log_normalizer = (hidden.new_empty(n, dtype=torch.float32) for _ in range(3))
        buffer, probabilities = (hidden.new_empty(rows, len(weight), dtype=torch.float32) for _ in range(2))
        for i in range(0, n, rows):
            chunk = slice(i, i + rows)
            logits = _logits(hidden[chunk], weight, scale, buffer)
            if num_kept is not None:
                _drop_filtered(logits, targets[chunk], num_kept[chunk])
            largest = logits.amax(-1, keepdim=True)
            logits.sub_(largest)
            p = torch.exp(logits, out=probabilities[: len(logits)])
            total = p.sum(-1, keepdim=True)
            log_total = total.log()
            logprobs[chunk] = (logits.gather(1, targets[chunk, None]) - log_total).squeeze(1)
            log_normalizer[chunk] = (largest + log_total).squeeze(1)
            p.div_(total)
            entropy[chunk] = log_total.squeeze(1) - logits.mul_(p).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, log_normalizer, entropy, num_kept)
        ctx.scale, ctx.rows, ctx.add_to_grad = scale, rows, add_to_grad
        ctx.last = probabilities if any(ctx.needs_input_grad) else None
        ctx.set_materialize_grads(False)  # an unused entropy then costs nothing in backward
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, targets, log_normalizer, entropy, num_kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            if ctx.add_to_grad and weight.grad is not None:
                grad_weight = weight.grad
            else:  # one fp32 sum over chunks, also for bf16 weights: rounding once, not once per chunk
                grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        buffer, ctx.last = ctx.last, None
        if buffer is None:
            raise RuntimeError("backward ran twice through the head; the last chunk's probabilities are used up")
        starts = range(0, hidden.shape[0], ctx.rows)
        for i in reversed(starts):
            chunk = slice(i, i + ctx.rows)
            if i == starts[-1] and grad_entropy is None:
                p = buffer[: len(targets[chunk])]
            else:
                p = _logits(hidden[chunk], weight, ctx.scale, buffer)
                if num_kept is not None:
                    _drop_filtered(p, targets[chunk], num_kept[chunk])
                p.sub_(log_normalizer[chunk, None])
                if grad_entropy is None:
                    p.exp_()
            grad = _grad_logits(p, targets[chunk], entropy[chunk], grad_logprobs, grad_entropy, chunk)
            grad = grad.mul_(ctx.scale).to(weight.dtype) if ctx.scale != 1.0 else grad.to(weight.dtype)
            torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                if weight.dtype == torch.float32:
                    grad_weight.addmm_(grad.t(), hidden[chunk])
                else:
                    grad_weight.add_(torch.mm(grad.t(), hidden[chunk]))
        if ctx.add_to_grad and grad_weight is not None:
            weight.grad, grad_weight = grad_weight, None
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def _grad_logits(
    values: Tensor,  # (rows, V) probabilities, or log-probabilities where grad_entropy is given; overwritten
    targets: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    chunk: slice,
) -> Tensor:
    """Gradient with respect to the scaled logits of one chunk, (rows, V)."""
    if grad_entropy is None:
        if grad_logprobs is None:
            return values.zero_()
        grad = values.mul_(grad_logprobs[chunk, None].neg())
    else:
        probabilities = values.exp()
        coefficient = values.add_(entropy[:, None]).mul_(grad_entropy[chunk, None])
        if grad_logprobs is not None:
            coefficient.add_(grad_logprobs[chunk, None])
        grad = coefficient.mul_(probabilities).neg_()
    if grad_logprobs is not None:
        grad.scatter_add_(1, targets[:, None], grad_logprobs[chunk, None])
    return grad
