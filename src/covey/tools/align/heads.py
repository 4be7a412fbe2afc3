"""Attention computed again from captured queries, keys and values, as it is meant and as it may have gone wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from covey.tools.align.hooks import ROPE
from covey.tools.align.pair import Pair


class Heads:
    """Queries, keys and values of both sides on the witness rows, with rotary tables."""

    def __init__(self, sides: list[dict[str, Tensor]], head_dim: int, scale: float) -> None:
        self._sides, self._head_dim, self.scale = sides, head_dim, scale

    @classmethod
    def of(cls, pair: Pair, rung: str, size: int) -> Heads | None:
        """None where a projection was not captured."""
        width = pair.a.facts["head_dim"]
        sides: list[dict[str, Tensor]] = [{}, {}]
        for key in ("q", "k", "v"):
            values = pair.values(rung, f"self_attn.{key}_norm") or pair.values(rung, f"self_attn.{key}_proj")
            if values is None:
                return None
            for side, rows in zip(sides, values, strict=True):
                side[key] = rows[:size].double().reshape(min(size, len(rows)), -1, width).transpose(0, 1)
        for key in ("cos", "sin"):
            values = pair.values(ROPE, key)
            for i, side in enumerate(sides):
                side[key] = values[i][:size].double() if values is not None else torch.tensor(float(key == "cos"))
        layer = int(rung.split()[1])
        scale = pair.a.facts["attention_scale"][layer] or width**-0.5
        return cls(sides, width, scale)

    def run(
        self,
        which: int,
        scale: float | None = None,
        *,
        mask: str = "causal",
        rotation: str = "halves",
        grouping: str = "repeat",
    ) -> Tensor:
        """(rows, N * H) of side `which`."""
        side = self._sides[which]
        q, k, v = side["q"], side["k"], side["v"]
        q, k = (rotate(x, side["cos"], side["sin"], rotation) for x in (q, k))
        times = len(q) // len(k)
        if grouping == "repeat":
            k, v = (x.repeat_interleave(times, 0) for x in (k, v))
        else:
            k, v = (x.repeat(times, 1, 1) for x in (k, v))
        scores = q @ k.transpose(1, 2) * (self.scale if scale is None else scale)
        n = scores.shape[-1]
        if mask == "causal":
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        elif mask == "ahead":
            scores = scores.masked_fill(torch.ones(n, n).triu(2).bool(), -math.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)

    def hypotheses(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What may have gone wrong besides the scale, with the options of `run`."""
        yield "mask: B's outputs see all later tokens (no causal mask)", {"mask": "none"}
        yield "mask: B's outputs see one token ahead (the mask is shifted by one)", {"mask": "ahead"}
        yield "rope: B's queries and keys are not rotated", {"rotation": "none"}
        yield "rope: B rotates neighbouring channels, A halves of the head", {"rotation": "neighbours"}
        yield "rope: B rotates queries only the other way round", {"rotation": "backwards"}
        if self._sides[1]["q"].shape[0] != self._sides[1]["k"].shape[0]:
            yield "wrong weight: B deals key heads to query heads in turn, A in blocks", {"grouping": "in turn"}

    def fit_scale(self, target: Tensor) -> float:
        """The scale whose outputs are nearest: a grid over five decades, then smaller ones around the best."""
        low, high = math.log(1e-3), math.log(1e2)
        best = self.scale
        for _ in range(6):
            grid = torch.linspace(low, high, 25).tolist()
            gaps = [float((self.run(1, math.exp(x)) - target).norm()) for x in grid]
            best, step = grid[gaps.index(min(gaps))], (high - low) / 24
            low, high = best - step, best + step
        return math.exp(best)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, how: str) -> Tensor:
    """Rotary embedding of (heads, rows, H): halves (as the model means it), neighbours, backwards, none."""
    if how == "none" or cos.dim() == 0:
        return x
    half = x.shape[-1] // 2
    if how == "neighbours":
        c, s = (t[:, :half].repeat_interleave(2, 1) for t in (cos, sin))
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        return x * c + turned * s
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * (-sin if how == "backwards" else sin)
