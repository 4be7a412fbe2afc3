"""`covey align compare A B`: the ladder of two captures, rung by rung, the first that differs, and why it does.

    ids -> embedding -> rope -> layer i -> final norm -> logits -> logprobs -> advantages -> loss -> gradients -> update

Every rung is judged by a tolerance profile (measures.py); facts that no tolerance excuses (eos, eps, rope, scales,
weights) fail the rung that they act on even where the numbers are still close, because 1500 steps later they are not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.tools.align.bundle import Bundle, read_bundle
from covey.tools.align.causes import cause_of
from covey.tools.align.hooks import FINAL_NORM, LOGITS
from covey.tools.align.measures import Measure, Profile, measure, profile_named
from covey.tools.align.pair import Pair

_SCALARS = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/entropy")
_EXACT = 1e-6  # relative; advantages are fp64 on the host
_NEGLIGIBLE = 1e-3  # of the whole gradient's norm: a smaller part is compared with this instead of with itself


@dataclass(frozen=True)
class Rung:
    """One comparison. `tolerance` is of relative_l2 unless the note says otherwise."""

    rung: str
    name: str
    passed: bool
    measure: Measure | None = None
    tolerance: float | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For --json; numbers that are not finite become None."""
        m = self.measure
        numbers = {
            key: None if m is None or not np.isfinite(getattr(m, key)) else getattr(m, key)
            for key in ("cosine", "max_abs", "relative_l2", "norm_ratio")
        }
        return {
            "rung": self.rung,
            "name": self.name,
            "pass": self.passed,
            **numbers,
            "tolerance": self.tolerance,
            "note": self.note,
        }


def compare(a: Path, b: Path, *, profile: str = "fp32") -> dict[str, Any]:
    """{"pass", "profile", "first_divergence": {"rung", "name", "cause"} or None, "rungs": [...]} of two bundles."""
    return compare_bundles(read_bundle(a), read_bundle(b), profile_named(profile))


def compare_bundles(a: Bundle, b: Bundle, profile: Profile) -> dict[str, Any]:
    """See compare."""
    pair = Pair(a, b)
    rungs = list(_ladder(pair, profile))
    first = next((rung for rung in rungs if not rung.passed), None)
    found = None
    if first is not None:
        found = {"rung": first.rung, "name": first.name, "cause": cause_of(pair, first.rung, first.name)}
    return {
        "pass": first is None,
        "profile": profile.name,
        "first_divergence": found,
        "rungs": [rung.as_dict() for rung in rungs],
    }


def _ladder(pair: Pair, profile: Profile) -> Iterator[Rung]:
    yield from _ids(pair)
    if not pair.same_ids:
        return  # nothing below is of the same tokens
    for rung, name in pair.keys:
        yield _with_facts(pair, _step(pair, profile, rung, name))
    yield from _logprobs(pair, profile)
    yield from _advantages(pair)
    yield from _loss(pair, profile)
    yield from _gradients(pair, profile)
    yield _update(pair, profile)


def _ids(pair: Pair) -> Iterator[Rung]:
    a, b = pair.a.tensors, pair.b.tensors
    for what in ("prompt", "response"):
        pairs = [(a[f"{what}_{part}"], b[f"{what}_{part}"]) for part in ("ids", "lens")]
        equal = all(torch.equal(x, y) for x, y in pairs)
        note = "" if equal else "other tokens: nothing below can be compared; capture B with --from A"
        yield Rung("ids", what, equal, note=note)
    facts = pair.facts("ids", "eos")
    notes = [fact.text for fact in facts]
    for name in ("tokenizer_pad", "tokenizer_bos"):  # no number depends on them: masks come from lengths
        if pair.a.facts[name] != pair.b.facts[name]:
            notes.append(f"{name} {pair.a.facts[name]} in A, {pair.b.facts[name]} in B (changes no number)")
    yield Rung("ids", "eos", not facts, note="; ".join(notes))


def _step(pair: Pair, profile: Profile, rung: str, name: str) -> Rung:
    values = pair.values(rung, name)
    assert values is not None
    a, b = values
    tolerance = profile.activations(_depth(pair, rung))
    if a.shape != b.shape:
        return Rung(rung, name, False, note=f"width {a.shape[1]} in A, {b.shape[1]} in B")
    found = measure(a, b)
    passed = found.finite and found.relative_l2 <= tolerance and found.worst_row <= profile.worst_row * tolerance
    note = ""
    if (norms := pair.norms(rung, name)) is not None and len(norms[0]) == len(norms[1]):
        x, y = norms
        gap = float((y - x).abs().max() / x.mean().clamp(min=1e-30)) if len(x) else 0.0
        if not gap <= profile.worst_row * tolerance:
            row = int((y - x).abs().argmax())
            passed, note = False, f"norm of row {row}: {float(x[row]):.6g} in A, {float(y[row]):.6g} in B"
    return Rung(rung, name, passed, found, tolerance, note)


def _depth(pair: Pair, rung: str) -> int:
    if rung.startswith("layer "):
        return int(rung.split()[1])
    return pair.a.facts["model"]["num_hidden_layers"] if rung in (FINAL_NORM, LOGITS) else 0


def _with_facts(pair: Pair, rung: Rung) -> Rung:
    facts = pair.facts(rung.rung, rung.name)
    if not facts:
        return rung
    notes = "; ".join(part for part in (rung.note, *(fact.text for fact in facts)) if part)
    return replace(rung, passed=False, note=notes)


def _logprobs(pair: Pair, profile: Profile) -> Iterator[Rung]:
    for name in ("logprobs", "entropy", "rollout_logprobs"):
        a, b = pair.a.tensors[name].double(), pair.b.tensors[name].double()
        if name == "rollout_logprobs" and not a.any() and not b.any():
            continue  # greedy, or given answers: drawn with probability 1
        apart = (b - a).abs()
        mean, largest, bias = float(apart.mean()), float(apart.max()), float((b - a).mean())
        by_chance = 3 * float(apart.square().mean().sqrt()) / len(apart) ** 0.5  # three standard errors of the mean
        passed = mean <= profile.logprob_mean and largest <= profile.logprob_max
        passed = passed and abs(bias) <= profile.logprob_bias + by_chance
        note = f"mean |B - A| {mean:.2g}, mean {bias:+.2g}, tolerance of the mean"
        yield _with_facts(pair, Rung("logprobs", name, passed, measure(a, b), profile.logprob_mean, note))


def _advantages(pair: Pair) -> Iterator[Rung]:
    for name in ("rewards", "advantages"):
        a, b = pair.a.tensors[name], pair.b.tensors[name]
        same_unscored = torch.equal(a.isnan(), b.isnan())
        found = measure(a.nan_to_num(), b.nan_to_num())
        yield Rung("advantages", name, same_unscored and found.relative_l2 <= _EXACT, found, _EXACT)


def _loss(pair: Pair, profile: Profile) -> Iterator[Rung]:
    a, b = pair.a.meta["stats"], pair.b.meta["stats"]
    scalars = [(name, a[name], b[name]) for name in _SCALARS if name in a and name in b]
    # The loss of an on-policy step is about 0 on both sides; its slope is not.
    scalars.append(("mean(advantage x logprob)", _objective(pair.a), _objective(pair.b)))
    for name, x, y in scalars:
        allowed = max(profile.loss_relative * abs(x), profile.loss_absolute)
        found = measure(torch.tensor(x), torch.tensor(y))
        note = f"{x:.6g} in A, {y:.6g} in B, tolerance absolute"
        yield Rung("loss", name, abs(y - x) <= allowed, found, allowed, note)


def _objective(bundle: Bundle) -> float:
    lengths, sizes = bundle.tensors["response_lens"], bundle.meta["group_sizes"]
    advantages = torch.cat([row[:size] for row, size in zip(bundle.tensors["advantages"], sizes, strict=True)])
    of_tokens = advantages.repeat_interleave(lengths)
    return float((of_tokens * bundle.tensors["logprobs"].double()).mean())


def _gradients(pair: Pair, profile: Profile) -> Iterator[Rung]:
    """From the head back to the embedding, as the backward goes."""
    a, b = pair.a.meta["parameters"], pair.b.meta["parameters"]
    names = [name for name in a if "grad_norm" in a[name] and "grad_norm" in b.get(name, {})]
    totals = [float(np.linalg.norm([of[name]["grad_norm"] for name in names])) for of in (a, b)]
    floor = _NEGLIGIBLE * totals[0]
    for name in reversed(names):
        x, y = (_kept_rows(bundle, other, "gradient", name) for bundle, other in ((pair.a, pair.b), (pair.b, pair.a)))
        if x.shape != y.shape:
            yield Rung("gradients", name, False, note=f"shape {list(x.shape)} in A, {list(y.shape)} in B")
            continue
        found = measure(x, y)
        apart = float((y.double() - x.double()).norm())
        norm_gap = abs(a[name]["grad_norm"] - b[name]["grad_norm"])
        share = float(x.double().norm()) / a[name]["grad_norm"] if a[name]["grad_norm"] else 1.0
        passed = found.finite or not a[name]["grad_norm"]
        passed &= apart <= profile.gradient * max(float(x.double().norm()), floor * share)
        passed &= norm_gap <= profile.gradient * max(a[name]["grad_norm"], floor)
        note = "" if len(x) else "no row in both bundles: norms compared only"
        yield Rung("gradients", name, bool(passed), found, profile.gradient, note)
    found = measure(torch.tensor(totals[0]), torch.tensor(totals[1]))
    passed = abs(totals[1] - totals[0]) <= profile.gradient * totals[0]
    note = f"{totals[0]:.6g} in A, {totals[1]:.6g} in B"
    yield Rung("gradients", "norm of all", passed, found, profile.gradient, note)


def _update(pair: Pair, profile: Profile) -> Rung:
    a, b = pair.a.meta["parameters"], pair.b.meta["parameters"]
    names = [name for name in a if "after" in a[name] and "after" in b.get(name, {})]
    parts = [[], []]
    for name in names:
        x, y = (_kept_rows(bundle, other, "update", name) for bundle, other in ((pair.a, pair.b), (pair.b, pair.a)))
        if x.shape == y.shape and len(x):
            parts[0].append(x.flatten())
            parts[1].append(y.flatten())
    found = measure(*(torch.cat(part) if part else torch.zeros(0) for part in parts))
    equal = sum(a[name]["after"]["sha256"] == b[name]["after"]["sha256"] for name in names)
    passed = 1 - found.cosine <= profile.update and abs(found.norm_ratio - 1) <= profile.update
    rows = "tolerance of 1 - cosine" if parts[0] else "no row in both bundles"
    note = f"{equal} of {len(names)} weights have equal bits afterwards; {rows}"
    return Rung("update", "moved weights", passed, found, profile.update, note)


def _kept_rows(bundle: Bundle, other: Bundle, kind: str, name: str) -> Tensor:
    """The rows of a gradient or update that both bundles have."""
    mine, its = (x.tensors[f"gradient_rows/{name}"].numpy() for x in (bundle, other))
    _, at, _ = np.intersect1d(mine, its, return_indices=True)
    return bundle.tensors[f"{kind}/{name}"][at]
