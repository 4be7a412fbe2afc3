"""What an update adds up over its micro-batches and ranks, and the metrics that come of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from covey.distributed.collectives import gather_objects, max_dicts, sum_dicts
from covey.distributed.mesh import Mesh


@dataclass
class UpdateTotals:
    """Sums over the micro-batches of an update; read from the device once, at the end."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    gap_max: Tensor | None = None
    grad_norms: list[float] = field(default_factory=list)
    lr: float = 0.0
    packed_tokens: int = 0  # run by this rank

    def add_tokens(self, **values: Tensor) -> None:
        """Add the sum of each vector (n,) of a micro-batch to the total of its name."""
        for name, value in values.items():
            total = value.detach().float().sum()
            self.sums[name] = self.sums[name] + total if name in self.sums else total

    def add_gap(self, gap: Tensor) -> None:
        """Add training - rollout log-probabilities (n,) of a micro-batch; those that are not finite are left out."""
        known = gap.isfinite()
        gap = torch.where(known, gap, 0.0)
        size = gap.abs()
        self.add_tokens(
            gap_tokens=known,
            gap=size,
            gap_large=size > 0.1,
            gap_k3=torch.expm1(gap.clamp(-20, 20)) - gap,
        )
        largest = size.max() if size.numel() else size.new_zeros(())
        self.gap_max = largest if self.gap_max is None else torch.maximum(self.gap_max, largest)

    def add_optimizer_step(self, grad_norm: float, lr: float) -> None:
        """Add an optimizer step; a norm that is not finite means that it was skipped."""
        self.grad_norms.append(grad_norm)
        self.lr = lr

    def metrics(self, mesh: Mesh) -> dict[str, float]:
        """Metrics under the names of metrics.py, over all ranks."""
        what = "statistics of the update"
        sums = sum_dicts({name: float(value) for name, value in self.sums.items()}, mesh.step_group, what=what)
        largest = {} if self.gap_max is None else {"gap": float(self.gap_max)}
        gap_max = max_dicts(largest, mesh.step_group, what=what).get("gap", 0.0)
        packed = gather_objects(self.packed_tokens, mesh.step_group, what=what)[-mesh.dp :]  # of one stage
        finite = [norm for norm in self.grad_norms if np.isfinite(norm)]
        values = {
            "actor/lr": self.lr,
            "actor/skipped_steps": float(len(self.grad_norms) - len(finite)),
        }
        if finite:
            values["actor/grad_norm"] = float(np.mean(finite))
        num_tokens = sums.get("tokens", 0.0)
        if not num_tokens:
            return values
        steps = max(1, len(self.grad_norms))
        values |= {
            "actor/loss": sums["loss"] / steps,
            "actor/pg_loss": sums["pg_loss"] / steps,
            "actor/entropy": sums["entropy"] / num_tokens,
            "actor/pg_clipfrac": sums["clipped"] / num_tokens,
            "actor/ppo_kl": sums["ppo_kl"] / num_tokens,
            "actor/nonfinite_tokens": sums["nonfinite"],
            "rollout/logprob_gap_mean": sums["gap"] / max(1.0, sums["gap_tokens"]),
            "rollout/logprob_gap_max": gap_max,
            "rollout/logprob_gap_share": sums["gap_large"] / max(1.0, sums["gap_tokens"]),
            "rollout/mismatch_k3": sums["gap_k3"] / max(1.0, sums["gap_tokens"]),
        }
        if len(packed) > 1:
            values["update/token_imbalance"] = max(packed) * len(packed) / sum(packed) - 1.0
        if "kl" in sums:
            values["actor/kl_loss"] = sums["kl"] / num_tokens
        if "distill_kl" in sums:
            values["distill/kl"] = sums["distill_kl"] / num_tokens
        if "rollout_weight" in sums:
            values["rollout/weight_mean"] = sums["rollout_weight"] / num_tokens
        return values
