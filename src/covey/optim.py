"""AdamW with fp32 master weights, and the learning rate as a function of the optimizer step.

Decoupled weight decay (arXiv:1711.05101) applies to matrices only. 16-bit weights are updated through fp32 copies: a
step of lr 1e-6 is below the spacing of bfloat16 numbers and would otherwise be lost.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from covey.config.schema import TrainConfig
from covey.distributed.fsdp import local_tensor


def total_norm(grads: Sequence[Tensor | None]) -> Tensor:
    """Norm of a gradient that this process holds whole."""
    return torch.nn.utils.get_total_norm([g for g in grads if g is not None])


def learning_rate(optimizer_step: int, config: TrainConfig, total_steps: int) -> float:
    """Learning rate of optimizer step 0, 1, ...: linear warm-up, then constant, linear or cosine down to min_lr."""
    warmup = config.warmup_steps or math.ceil(config.warmup_fraction * total_steps)
    if optimizer_step < warmup:
        return config.lr * (optimizer_step + 1) / warmup
    progress = (optimizer_step - warmup) / max(1, total_steps - warmup)
    if config.schedule == "constant":
        return config.lr
    shape = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.min_lr + (config.lr - config.min_lr) * max(0.0, shape)


class Optimizer:
    """AdamW over fp32 masters of a model's trainable parameters (the parameters themselves where they are fp32)."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        config: TrainConfig,
        *,
        norm: Callable[[Sequence[Tensor | None]], Tensor] = total_norm,
    ) -> None:
        """norm: of the whole gradient, from the gradients that this process holds, in the parameters' order."""
        self.parameters = [p for p in parameters if p.requires_grad]
        self.masters = [_master(p) for p in self.parameters]
        self._norm = norm
        decayed = [m for m in self.masters if m.dim() >= 2]
        others = [m for m in self.masters if m.dim() < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
        )
        self.max_grad_norm = config.max_grad_norm

    def step(self, lr: float) -> float:
        """Clip, update, clear the gradients; returns the gradient's norm before clipping.

        A gradient that is not finite changes nothing: the caller sees it in the returned norm and counts it.
        """
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                master.grad = None if parameter.grad is None else local_tensor(parameter.grad).float()
        norm = self._norm([master.grad for master in self.masters])
        if math.isfinite(value := float(norm)):
            if self.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(self.masters, self.max_grad_norm, norm)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self.publish()
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None
        return value

    def publish(self) -> None:
        """Round the masters into the 16-bit weights that the model runs on."""
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter.dtype != torch.float32:
                    local_tensor(parameter).copy_(master)

    def checksum(self) -> str:
        """16 hex digits of this process's masters: their bits, summed tensor by tensor on the device.

        One read of the weights; equal weights give equal text on every device, and a changed bit another one.
        """
        sums = [master.detach().contiguous().view(torch.int32).sum(dtype=torch.int64) for master in self.masters]
        host = torch.stack(sums).cpu().numpy().tobytes() if sums else b""
        return hashlib.sha256(host).hexdigest()[:16]

    def moments(self) -> list[dict[str, Tensor]]:
        """AdamW's two moments of each parameter, live."""
        return [{kind: self._state(master)[kind] for kind in ("exp_avg", "exp_avg_sq")} for master in self.masters]

    @property
    def steps(self) -> list[float]:
        """AdamW's step count of each parameter."""
        return [float(self._state(master)["step"]) for master in self.masters]

    @steps.setter
    def steps(self, values: list[float]) -> None:
        for master, value in zip(self.masters, values, strict=True):
            self._state(master)["step"].fill_(value)

    def _state(self, master: Tensor) -> dict[str, Tensor]:
        """AdamW's state of a parameter; zeros before its first step, as AdamW itself begins."""
        state = self._adamw.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
        return state


def _master(parameter: Tensor) -> Tensor:
    """The fp32 numbers that AdamW updates: the parameter or this rank's piece of it, or a copy of a 16-bit one."""
    if parameter.dtype != torch.float32:
        return local_tensor(parameter).detach().float()
    local = local_tensor(parameter)
    return parameter if local is parameter else local.detach()
