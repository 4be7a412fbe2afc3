"""Why two captures differ at the rung where they first do: a kind, and the evidence for it.

Evidence in the order of its weight: a fact that differs and acts on this step (eos, eps, rope, scale, a weight's
fingerprint), with what the numbers themselves say beside it; then the numbers alone: B's output of a step is computed
again from the captured inputs under each hypothesis, and the one that reproduces it is named (evidence.py). What no
hypothesis explains is called unexplained, with the pattern of the difference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from covey.tools.align import evidence
from covey.tools.align.hooks import ATTENTION, EMBEDDING, FINAL_NORM, LOGITS, OUTPUT, ROPE
from covey.tools.align.measures import measure
from covey.tools.align.pair import Pair


def cause_of(pair: Pair, rung: str, name: str) -> str:
    """`kind: evidence` for the first failing rung."""
    facts = pair.facts(rung, name)
    numbers = _numeric(pair, rung, name)
    if facts:
        kinds = list(dict.fromkeys(fact.kind for fact in facts))
        text = f"{', '.join(kinds)}: {'; '.join(fact.text for fact in facts)}"
        agrees = numbers and numbers.split(":")[0] in kinds
        return f"{text}; the numbers agree: {numbers.split(': ', 1)[1]}" if agrees else text
    return numbers or _pattern(pair, rung, name)


def _numeric(pair: Pair, rung: str, name: str) -> str:
    """The hypothesis that the numbers support; "" for none."""
    if rung in _OF_RUNG:
        return _OF_RUNG[rung](pair, name)
    if rung not in (EMBEDDING, ROPE, FINAL_NORM, LOGITS) and not rung.startswith("layer "):
        return ""
    found = _other_dtype(pair, rung, name)
    if found:
        return found
    if rung == ROPE:
        found = evidence.rope(pair)
    elif name == ATTENTION:
        found = evidence.attention(pair, rung)
    elif "norm" in name.rpartition(".")[2]:
        found = evidence.norm(pair, rung, name)
    elif name.endswith("_proj"):
        found = evidence.linear(pair, rung, name)
    elif name == OUTPUT and (rung, ATTENTION) in pair.keys:
        found = "residual: every step within the layer agrees, their sum does not"
    return found or evidence.precision(pair, rung, name)


def _other_dtype(pair: Pair, rung: str, name: str) -> str:
    """Two number types that differ by no more than rounding explain themselves."""
    values = pair.values(rung, name)
    if values is None or values[0].shape != values[1].shape or values[0].dtype == values[1].dtype:
        return ""
    return evidence.rounded(*values) if measure(*values).relative_l2 < 5e-2 else ""


def _ids(pair: Pair, name: str) -> str:
    if name == "response":
        for i, (a, b) in enumerate(zip(_responses(pair, 0), _responses(pair, 1), strict=False)):
            if a == b:
                continue
            common = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            if common == min(len(a), len(b)):  # one goes on where the other ended
                longer = "B" if len(b) > len(a) else "A"
                last = (a if longer == "B" else b)[-1:]
                facts = "; ".join(fact.text for fact in pair.facts("ids", "eos")) or "no id differs"
                return f"eos: response {i} goes on in {longer} after token {last}, which ended it; {facts}"
            return f"sampling: response {i} differs from its token {common} on: another draw, or other probabilities"
    return "prompt: other prompt tokens: template, tokenizer or data; capture B with --from A"


def _responses(pair: Pair, which: int) -> list[list[int]]:
    bundle = (pair.a, pair.b)[which]
    lengths = bundle.tensors["response_lens"].tolist()
    return [part.tolist() for part in bundle.tensors["response_ids"].split(lengths)]


def _logprobs(pair: Pair, name: str) -> str:
    if name == "rollout_logprobs":
        return "rollout: the engines disagree, the training forward does not: engine, its kernels or its weights"
    kept = {bundle.meta["settings"]["algorithm"]["sampling_consistent"] for bundle in (pair.a, pair.b)}
    if len(kept) > 1:
        return "filters: algorithm.sampling_consistent is on in one of the two"
    return evidence.rounded(pair.a.tensors[name], pair.b.tensors[name]) or (
        "log-softmax: logits agree and log-probabilities do not: its precision, or the temperature"
    )


def _advantages(pair: Pair, name: str) -> str:
    settings = "; ".join(t for t in pair.settings("algorithm") if "advantage" in t or "kl" in t or "overlong" in t)
    if name == "rewards":
        return "rewards: the set was scored otherwise; capture B with --from A"
    if settings:
        return f"settings: {settings}"
    a, b = (bundle.tensors["advantages"].nan_to_num() for bundle in (pair.a, pair.b))
    found = measure(a, b)
    size = a.shape[1]
    if found.cosine > 1 - 1e-9:
        bessel = (size / (size - 1)) ** 0.5 if size > 1 else 1.0
        which = ": the deviation of one divides by n, of the other by n - 1"
        near = any(abs(found.norm_ratio / ratio - 1) < 1e-3 for ratio in (bessel, 1 / bessel))
        return f"normalisation: B is A times {found.norm_ratio:.6g}{which if near and size > 1 else ''}"
    return ""


def _loss(pair: Pair, name: str) -> str:
    settings = pair.settings("algorithm", "rollout")
    if settings:
        return f"settings: {'; '.join(settings)}"
    return "loss: log-probabilities and advantages agree, the loss does not: its weights or denominator"


def _gradients(pair: Pair, name: str) -> str:
    if name not in pair.a.meta["parameters"]:
        return ""
    a, b = (bundle.tensors[f"gradient/{name}"] for bundle in (pair.a, pair.b))
    if a.shape == b.shape and len(a):
        found = measure(a, b)
        if found.finite and found.cosine > 1 - 1e-4 and abs(found.norm_ratio - 1) > 1e-3:
            return (
                f"scale: B's gradient is A's times {found.norm_ratio:.6g}: a mean for a sum over ranks or "
                "micro-batches, another denominator, or a loss scale"
            )
        if not b.any() or not a.any():
            return f"no gradient in {'B' if a.any() else 'A'}: frozen, or cut off from the loss"
        if reduced := evidence.rounded(a, b):
            return reduced
    return f"backward: the forward agrees up to the loss; the first gradient from the head on that differs is {name}'s"


def _update(pair: Pair, name: str) -> str:
    settings = pair.settings("train")
    if settings:
        return f"settings: {'; '.join(settings)}"
    return "optimizer: gradients agree and the moved weights do not: fp32 masters, moments, clipping or weight decay"


_OF_RUNG: dict[str, Callable[[Pair, str], str]] = {
    "ids": _ids,
    "logprobs": _logprobs,
    "advantages": _advantages,
    "loss": _loss,
    "gradients": _gradients,
    "update": _update,
}


def _pattern(pair: Pair, rung: str, name: str) -> str:
    """What can be said of a difference that no hypothesis explains."""
    values = pair.values(rung, name)
    if values is None or values[0].shape != values[1].shape:
        return "unexplained"
    a, b = (x.double() for x in values)
    if not torch.isfinite(b).all() or not torch.isfinite(a).all():
        return f"not finite: {int((~torch.isfinite(b)).sum())} numbers in B, {int((~torch.isfinite(a)).sum())} in A"
    of_rows = (b - a).norm(dim=1)
    worst = int(of_rows.argmax())
    what = {key: int(pair.rows_of(key)[worst]) for key in ("group", "sample", "position")} if rung != LOGITS else {}
    same = float((of_rows == 0).double().mean())
    return f"unexplained: no hypothesis reproduces B; {same:.0%} of rows equal, largest at {what}"
