"""All checks before the first step: `covey train` runs them at its start, `covey doctor --config FILE` on their own.

A failure stops a run, a warning is printed and kept in run.json. A check can be left out by name, with the reason, in
`preflight.skip`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass

from covey.checks.material import Material, gather
from covey.checks.resources import check_disk, check_memory
from covey.checks.rewards import check_rewards
from covey.checks.rows import check_batch, check_lengths
from covey.checks.tokens import check_eos, check_pad_bos, check_prompt_ids, check_turn_end
from covey.checks.weights import (
    check_dtype,
    check_norm_eps,
    check_rope,
    check_tied_embeddings,
    check_vocabulary,
    check_weights,
)
from covey.config.schema import Config
from covey.findings import Finding

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Check:
    run: Callable[[Material], Finding]
    needs: tuple[str, ...]  # parts of the material without which it is skipped


CHECKS: dict[str, _Check] = {
    "eos": _Check(check_eos, ("model", "tokenizer")),
    "turn_end": _Check(check_turn_end, ("model", "tokenizer", "prompts")),
    "pad_bos": _Check(check_pad_bos, ("model", "tokenizer")),
    "vocabulary": _Check(check_vocabulary, ("model", "tokenizer")),
    "prompt_ids": _Check(check_prompt_ids, ("model", "tokenizer", "prompts")),
    "weights": _Check(check_weights, ("model",)),
    "tied_embeddings": _Check(check_tied_embeddings, ("model",)),
    "norm_eps": _Check(check_norm_eps, ("model",)),
    "rope": _Check(check_rope, ("model",)),
    "dtype": _Check(check_dtype, ("device",)),
    "rewards": _Check(check_rewards, ("prompts", "tokenizer", "scorer")),
    "lengths": _Check(check_lengths, ("model", "tokenizer", "prompts")),
    "batch": _Check(check_batch, ("prompts", "mesh")),
    "disk": _Check(check_disk, ("model", "trained_model")),
    "memory": _Check(check_memory, ("trained_model", "device", "mesh")),
}


def preflight_findings(config: Config, material: Material | None = None) -> list[Finding]:
    """One finding for every check of CHECKS, and one for every part that could not be loaded.

    material: a run's own parts; None: gathered from the configuration, without reading weights. ValueError for an
    unknown name in preflight.skip.
    """
    if unknown := sorted(config.preflight.skip.keys() - CHECKS.keys()):
        raise ValueError(f"preflight.skip: {unknown[0]!r} is no check; known: {', '.join(CHECKS)}")
    if material is not None:
        return [_run(name, check, material) for name, check in CHECKS.items()]
    with closing(gather(config)) as gathered:
        found = [_run(name, check, gathered) for name, check in CHECKS.items()]
        return [*_not_loaded(gathered), *found]


def failures(findings: Iterable[Finding]) -> str | None:
    """One paragraph with everything that stops a run; None when nothing does."""
    texts = [_text(finding) for finding in findings if finding.severity == "failure"]
    if not texts:
        return None
    return (
        f"preflight: {len(texts)} of {len(CHECKS)} checks failed. " + " | ".join(texts) + ". A check is left out by "
        "preflight.skip: {NAME: why}"
    )


def log_warnings(findings: Iterable[Finding]) -> None:
    """One line for every warning."""
    for finding in findings:
        if finding.severity == "warning":
            log.warning("preflight %s", _text(finding))


def _run(name: str, check: _Check, material: Material) -> Finding:
    if reason := material.config.preflight.skip.get(name):
        return Finding(name, "skipped", "not looked at", "", f"preflight.skip: {reason}", "")
    if absent := [part for part in check.needs if getattr(material, part) is None]:
        why = material.missing.get(absent[0], f"no {absent[0]}")
        return Finding(name, "skipped", "not looked at", "", f"needs the {absent[0]}: {why}", "")
    try:
        return check.run(material)
    except (ValueError, OSError) as error:
        return Finding(name, "failure", str(error), "a check that can be made", "what it looks at cannot be read", "")


def _not_loaded(material: Material) -> list[Finding]:
    """What would stop the run before its checks; what is merely elsewhere is skipped."""
    found, follows = [], {"prompts": "tokenizer", "trained_model": "model"}
    for part, why in material.missing.items():
        if follows.get(part) in material.missing:
            continue  # said already
        severity = "skipped" if why.endswith(("not on this disk", "not read here")) else "failure"
        found.append(Finding(f"load_{part}", severity, why, f"the {part} can be loaded", "a run needs it", ""))
    return found


def _text(finding: Finding) -> str:
    fix = f"; {finding.fix}" if finding.fix else ""
    return f"{finding.rule}: {finding.found} (expected: {finding.expected}); {finding.why}{fix}"
