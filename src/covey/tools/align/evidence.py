"""Hypotheses about a step, each tested on numbers: what B computed from its inputs, if the hypothesis were true.

A test answers `kind: evidence`, or "" when it explains nothing. Inputs and outputs are the captured rows of both
bundles, in float64, so a test needs no weights and no device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from covey.tools.align.heads import Heads
from covey.tools.align.hooks import ATTENTION, EMBEDDING, FINAL_NORM, OUTPUT, ROPE
from covey.tools.align.measures import measure
from covey.tools.align.pair import Pair

_EXPLAINS = 0.1  # a hypothesis must leave less than this share of the difference
_ROUNDED = 0.999  # share of values that are numbers of the lower precision


def precision(pair: Pair, rung: str, name: str) -> str:
    """Whether one side's values are numbers of a lower precision, or differ as if its inputs had been rounded."""
    values = pair.values(rung, name)
    if values is None or values[0].shape != values[1].shape:
        return ""
    if found := rounded(*values):
        return found
    a, b = (x.double() for x in values)
    apart = measure(a, b)
    if not apart.finite or apart.cosine < 0.999 or apart.relative_l2 > 2e-2:
        return ""
    # Rounding is unlike every fault: no row and no channel is spared, and the sign of the error is random.
    error = (b - a).flatten()
    spared = float((error == 0).double().mean())
    bias = abs(float(error.mean())) / max(float(error.abs().mean()), 1e-300)
    if spared < 0.5 and bias < 0.3:
        size = apart.relative_l2
        return f"reduced precision: a random error of {size:.1e} in every row, as from inputs of {_bits(size)}"
    return ""


def rounded(a: Tensor, b: Tensor) -> str:
    """Whether the values of just one of the two fit into bfloat16 or float16."""
    if a.dtype != b.dtype:
        return f"reduced precision: {_name(a.dtype)} in A, {_name(b.dtype)} in B"
    for dtype in (torch.bfloat16, torch.float16):
        shares = [float((x == x.to(dtype).to(x.dtype)).double().mean()) if x.numel() else 0.0 for x in (a, b)]
        for share, other, who in ((shares[1], shares[0], "B"), (shares[0], shares[1], "A")):
            if share > _ROUNDED and other < 0.9:
                are = f"{share:.1%} of {who}'s values are {_name(dtype)} numbers"
                return f"reduced precision: {are}, {other:.1%} of the other's"
    return ""


def rope(pair: Pair) -> str:
    """The base, the scale and the offset of the rotary angles of both sides."""
    tables = [pair.values(ROPE, name) for name in ("cos", "sin")]
    if tables[0] is None or tables[1] is None:
        return ""
    position = torch.from_numpy(pair.rows_of("position")).double()
    found = []
    for side in (0, 1):
        cos, sin = tables[0][side].double(), tables[1][side].double()
        scale = float((cos.square() + sin.square()).sqrt().mean())
        first = (position == 1).nonzero().flatten()
        if not len(first):
            return ""
        angle = torch.atan2(sin[first[0]], cos[first[0]])[: cos.shape[1] // 2]
        base = float(angle[1]) ** (-cos.shape[1] / 2) if float(angle[1]) > 0 else math.nan
        found.append((base, float(angle[0]), scale))
    (base_a, one_a, scale_a), (base_b, one_b, scale_b) = found
    if abs(one_b - one_a) > 1e-2:
        return f"rope: position 1 turns the first pair by {one_a:.3f} in A, {one_b:.3f} in B: other or scaled positions"
    if abs(base_b / base_a - 1) > 0.02:
        return f"rope: the angles are those of theta {base_a:.4g} in A, {base_b:.4g} in B"
    if abs(scale_b / scale_a - 1) > 1e-3:
        return f"rope: cos and sin are scaled by {scale_a:.4g} in A, {scale_b:.4g} in B"
    return rounded(*tables[0])


def norm(pair: Pair, rung: str, name: str) -> str:
    """eps from the ratio of the rows, a weight from the ratio of the channels.

    y = x w / sqrt(m + eps), m the mean square of x: B's eps is (m + eps_A) / ratio^2 - m.
    """
    x, y = _norm_input(pair, rung, name), pair.values(rung, name)
    if x is None or y is None or y[0].shape != y[1].shape or x[0].shape != x[1].shape:
        return ""
    a, b = (v.double() for v in y)
    # What B's input already had of difference does not count.
    xa, xb = (v.double() for v in x)
    if float((xb - xa).norm()) > 0.1 * float((b - a).norm()) / max(float(a.norm()), 1e-300) * float(xa.norm()):
        return ""
    by_row = (a * b).sum(1) / a.square().sum(1)
    by_channel = (a * b).sum(0) / a.square().sum(0).clamp(min=1e-300)
    apart = float((b - a).norm())
    if float((b - a * by_row[:, None]).norm()) < _EXPLAINS * apart:
        eps_a = _eps_of(pair, rung, name)
        size = xa.square().mean(1)
        eps_b = (size + eps_a) / by_row.square() - size
        low, middle, high = (float(eps_b.quantile(q)) for q in (0.25, 0.5, 0.75))
        if high - low <= 0.2 * abs(middle):
            return f"eps: B's rows are those of eps {middle:.2g}, A's of {eps_a:.2g}"
        return (
            f"norm: B's rows are A's times {float(by_row.min()):.4g} to {float(by_row.max()):.4g}, not by another eps"
        )
    if float((b - a * by_channel).norm()) < _EXPLAINS * apart:
        worst = int((by_channel - 1).abs().argmax())
        return (
            f"wrong weight: B's channels are A's times fixed factors (channel {worst}: {float(by_channel[worst]):.4g})"
        )
    return ""


def linear(pair: Pair, rung: str, name: str) -> str:
    """A bias from a difference that is the same in every row, a factor from a constant ratio."""
    values = pair.values(rung, name)
    if values is None or values[0].shape != values[1].shape:
        return ""
    a, b = (v.double() for v in values)
    apart = float((b - a).norm())
    offset = (b - a).mean(0)
    if float((b - a - offset).norm()) < _EXPLAINS * apart:
        bias = pair.a.tensors.get(f"weight/model.{_module(rung, name)}.bias")
        if bias is not None and float((offset + bias.double()).norm()) < _EXPLAINS * float(bias.double().norm()):
            return f"dropped bias: B is A without the bias of {name} (norm {float(bias.double().norm()):.4g})"
        return f"wrong weight: B differs by the same vector in every row (norm {float(offset.norm()):.4g}): its bias"
    ratio = float((a * b).sum() / a.square().sum())
    if float((b - a * ratio).norm()) < _EXPLAINS * apart:
        return f"scale: B is A times {ratio:.6g}"
    apart_relative = measure(a, b)
    if apart_relative.relative_l2 > 0.1:
        return (
            "wrong weight: inputs agree, outputs are unrelated "
            f"(cosine {apart_relative.cosine:.3f}) though both loaded the same numbers: laid out or applied otherwise"
        )
    return ""


def attention(pair: Pair, rung: str) -> str:
    """Attention computed again on a prefix of one sequence: with other scales, masks, rotations, head groupings."""
    size = pair.num_witness
    heads = Heads.of(pair, rung, size)
    core = pair.values(rung, ATTENTION)
    if heads is None or core is None or size < 3:
        return ""
    target_a, target_b = (v[:size].double() for v in core)
    scale = heads.scale
    apart = float((target_b - target_a).norm())
    if apart < 1e-2 * _apart(pair, rung):
        return _between_sequences(pair, rung)
    if float((heads.run(0, scale) - target_a).norm()) > _EXPLAINS * apart:
        return ""  # this family's attention is not what is computed here
    found = [(float((heads.run(1, **options) - target_b).norm()), text) for text, options in heads.hypotheses()]
    fitted = heads.fit_scale(target_b)
    gap = float((heads.run(1, fitted) - target_b).norm())
    found.append((gap, f"attention scale: B's outputs are those of scale {fitted:.4g}, A's of {scale:.4g}"))
    residual, text = min(found)
    if residual < _EXPLAINS * apart:
        return f"{text} (leaves {residual / apart:.1e} of the difference)"
    return ""


def _between_sequences(pair: Pair, rung: str) -> str:
    """The first sequence of the first group agrees: which others do not?"""
    values = pair.values(rung, ATTENTION)
    assert values is not None
    apart = (values[1].double() - values[0].double()).norm(dim=1)
    wrong = apart > 1e-2 * apart.max()
    group, sample = (torch.from_numpy(pair.rows_of(what)) for what in ("group", "sample"))
    parts = {
        "later responses of the same group": (group == 0) & (sample > 0),
        "prompts of later groups": (group > 0) & (sample < 0),
        "responses of later groups": (group > 0) & (sample >= 0),
    }
    found = [name for name, rows in parts.items() if rows.any() and wrong[rows].double().mean() > 0.5]
    if not found or wrong[(group == 0) & (sample <= 0)].any():
        return ""
    return f"mask: the first sequence agrees, {', '.join(found)} do not: sequences of a batch see each other or padding"


def _apart(pair: Pair, rung: str) -> float:
    values = pair.values(rung, ATTENTION)
    assert values is not None
    return float((values[1].double() - values[0].double()).norm())


def _norm_input(pair: Pair, rung: str, name: str) -> tuple[Tensor, Tensor] | None:
    if rung == FINAL_NORM:
        return pair.values(f"layer {pair.a.facts['model']['num_hidden_layers'] - 1}", OUTPUT)
    layer = int(rung.split()[1])
    before = pair.values(f"layer {layer - 1}", OUTPUT) if layer else pair.values(EMBEDDING, "embed_tokens")
    if name.startswith("input") or before is None:
        return before
    if name.startswith("post_attention") and (added := pair.values(rung, "self_attn.o_proj")) is not None:
        return before[0] + added[0], before[1] + added[1]
    return None


def _eps_of(pair: Pair, rung: str, name: str) -> float:
    return pair.a.facts["eps"].get(_module(rung, name), 1e-6)


def _module(rung: str, name: str) -> str:
    return name if rung == FINAL_NORM else f"layers.{rung.split()[1]}.{name}"


def _bits(relative: float) -> str:
    """The number type whose rounding error is nearest."""
    kinds = {"bfloat16 (8 bits)": 2**-9, "float16 or TF32 (11 bits)": 2**-12}
    return min(kinds, key=lambda kind: abs(math.log(kinds[kind] / max(relative, 1e-12))))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
