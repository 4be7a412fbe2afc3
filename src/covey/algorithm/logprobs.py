"""Log-probabilities and entropies of chosen tokens from hidden states, without ever holding all logits.

The head's matrix product runs in the weights' dtype, everything after it in fp32, in chunks of rows; the backward pass
recomputes each chunk. Peak memory is one or two chunks, whatever tokens x vocabulary. Gradients, with z the logits
divided by the temperature, p = softmax(z), H the entropy:
    d logp_y / d z = onehot(y) - p          d H / d z_j = -p_j (log p_j + H)
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
) -> tuple[Tensor, Tensor]:
    """(log p(target), entropy) in nats, both (n,) fp32, of softmax(hidden @ weight.T / temperature).

    add_to_grad: backward() adds the head's gradient to `weight.grad` chunk by chunk and returns none for it, which saves
    a temporary of the weight's size. Only for an fp32 leaf whose gradient nobody else waits for (no FSDP, no hooks).
    """
    if add_to_grad and not (weight.is_leaf and weight.dtype == torch.float32):
        raise ValueError("add_to_grad needs an fp32 leaf tensor")
    return _ChunkedHead.apply(hidden, weight, targets, 1.0 / temperature, rows_per_chunk, add_to_grad)  # type: ignore[return-value]


def _logits(hidden: Tensor, weight: Tensor, inverse_temperature: float) -> Tensor:
    logits = torch.mm(hidden, weight.t()).float()
    return logits if inverse_temperature == 1.0 else logits.mul_(inverse_temperature)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        inverse_temperature: float,
        rows: int,
        add_to_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        n = hidden.shape[0]
        logprobs = torch.empty(n, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        log_normalizer = torch.empty_like(logprobs)
        for i in range(0, n, rows):
            chunk = slice(i, i + rows)
            logits = _logits(hidden[chunk], weight, inverse_temperature)
            log_normalizer[chunk] = torch.logsumexp(logits, -1)
            logits.sub_(log_normalizer[chunk, None])
            logprobs[chunk] = logits.gather(1, targets[chunk, None]).squeeze(1)
            entropy[chunk] = logits.exp().mul_(logits).sum(-1).neg_()
        ctx.save_for_backward(hidden, weight, targets, log_normalizer, entropy)
        ctx.inverse_temperature, ctx.rows, ctx.add_to_grad = inverse_temperature, rows, add_to_grad
        ctx.set_materialize_grads(False)  # an unused entropy then costs nothing in backward
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, targets, log_normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            if ctx.add_to_grad and weight.grad is not None:
                grad_weight = weight.grad
            else:  # one fp32 sum over chunks, also for bf16 weights: rounding once, not once per chunk
                grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for i in range(0, hidden.shape[0], ctx.rows):
            chunk = slice(i, i + ctx.rows)
            logp = _logits(hidden[chunk], weight, ctx.inverse_temperature).sub_(log_normalizer[chunk, None])
            grad = _grad_logits(logp, targets[chunk], entropy[chunk], grad_logprobs, grad_entropy, chunk)
            if ctx.inverse_temperature != 1.0:
                grad.mul_(ctx.inverse_temperature)
            grad = grad.to(weight.dtype)
            torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                if weight.dtype == torch.float32:
                    grad_weight.addmm_(grad.t(), hidden[chunk])
                else:
                    grad_weight.add_(torch.mm(grad.t(), hidden[chunk]))
        if ctx.add_to_grad and grad_weight is not None:
            weight.grad, grad_weight = grad_weight, None
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _grad_logits(
    logp: Tensor,  # (rows, V) log-probabilities; overwritten
    targets: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    chunk: slice,
) -> Tensor:
    """Gradient with respect to the scaled logits of one chunk, (rows, V)."""
    if grad_entropy is None:
        grad = logp.exp_()
        if grad_logprobs is None:
            return grad.zero_()
        grad.mul_(grad_logprobs[chunk, None].neg())
    else:
        probabilities = logp.exp()
        coefficient = logp.add_(entropy[:, None]).mul_(grad_entropy[chunk, None])
        if grad_logprobs is not None:
            coefficient.add_(grad_logprobs[chunk, None])
        grad = coefficient.mul_(probabilities).neg_()
    if grad_logprobs is not None:
        grad.scatter_add_(1, targets[:, None], grad_logprobs[chunk, None])
    return grad
