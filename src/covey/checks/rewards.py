"""Can the rewards tell a right answer from none? Some rows are scored with their references and with an empty text.

A reference may be a bare answer where the reward wants tags or \\boxed{} around it, so it is tried in several forms.
Not tried: rewards that a model gives (reward_model, judge), which cost memory or money.
"""

from __future__ import annotations

import numpy as np

from covey.checks.material import Material, reward_entries
from covey.findings import Finding
from covey.rewards.runner import RewardError
from covey.rewards.scores import Scores
from covey.rollout.reward_model import NAME as REWARD_MODEL
from covey.types import Group, Prompt, Response

_FORMS = ("", "{}", "\\boxed{{{}}}", "<think>\n\n</think>\n<answer>\n\\boxed{{{}}}\n</answer>")
_BY_MODELS = (REWARD_MODEL, "judge")
_EXPECTED = "scores within their range, a reference above an empty text, no errors"
_WHY = (
    "a reward that is constant, missing or out of range gives advantages of 0 or of the wrong size: nothing is learned"
)


def check_rewards(material: Material) -> Finding:
    """Range, constants, unscored share, errors."""
    config = material.config.reward
    asked = sorted({entry.name for entry in reward_entries(material.config)} & set(_BY_MODELS))
    if asked:
        return Finding("rewards", "skipped", f"{', '.join(asked)} asks a model", _EXPECTED, _WHY, "")
    if not reward_entries(material.config):
        return Finding("rewards", "skipped", "no reward function: a teacher alone", _EXPECTED, _WHY, "")
    sample = material.sample()
    try:
        scores = _try(material, sample)
    except RewardError as error:
        fix = "correct the function (`covey reward try` shows it), or set reward.on_error: none"
        return Finding("rewards", "failure", str(error), _EXPECTED, _WHY, fix)
    empty, best = scores.total[:, 0], _best(scores.total[:, 1:])
    known = scores.total[~np.isnan(scores.total)]
    share = float(np.isnan(scores.total).mean())
    failed = scores.counts["errors"] + scores.counts["timeouts"]
    evidence = {
        "rows": len(sample),
        "unscored_share": share,
        "errors": scores.counts["errors"],
        "timeouts": scores.counts["timeouts"],
        "empty_mean": _mean(empty),
        "reference_mean": _mean(best),
        "lowest": float(known.min()) if known.size else None,
        "highest": float(known.max()) if known.size else None,
        "constant": sorted(name for name, cells in scores.parts.items() if _constant(cells)),
    }
    found = f"{len(sample)} rows: reference {_spell(evidence['reference_mean'])}, empty text "
    found += f"{_spell(evidence['empty_mean'])}, unscored {share:.0%}, {failed} failures"
    if not known.size:
        fix = "look at one row with `covey reward try`: columns, options and time limit of the reward"
        return Finding("rewards", "failure", found, _EXPECTED, _WHY, fix, evidence)
    problem, fix = _problem(scores, evidence, normalised=config.normalization == "range")
    if problem:
        return Finding("rewards", "warning", f"{found}; {problem}", _EXPECTED, _WHY, fix, evidence)
    return Finding("rewards", "ok", found, _EXPECTED, _WHY, "", evidence)


def _problem(scores: Scores, evidence: dict, *, normalised: bool) -> tuple[str, str]:
    """(what is doubtful, what to do); empty texts when nothing is."""
    if evidence["errors"] or evidence["timeouts"]:
        return f"{evidence['errors']} errors, {evidence['timeouts']} timeouts", "`covey reward try` shows them"
    low = np.array([bounds[0] for bounds in scores.ranges])[:, None]
    high = np.array([bounds[1] for bounds in scores.ranges])[:, None]
    outside = int(((scores.total < low - 1e-9) | (scores.total > high + 1e-9)).sum())
    if outside:
        wrong = "normalization: range scales them wrongly" if normalised else "normalization: range would be wrong"
        return f"{outside} scores outside the declared range ({wrong})", "declare the reward's range"
    if evidence["unscored_share"] > 0.5:
        return "more than half is unscored", "a function that returns None has no opinion: is it meant for these rows?"
    if len(evidence["constant"]) == len(scores.parts):
        return "every reward is constant", "try a model's own responses with `covey reward try --responses`"
    reference, empty = evidence["reference_mean"], evidence["empty_mean"]
    if reference is not None and empty is not None and reference < empty:
        return "an empty text scores higher than the reference", "check the reward's sign and weights"
    return "", ""


def _try(material: Material, sample: list[Prompt]) -> Scores:
    assert material.scorer is not None
    groups = []
    for prompt in sample:
        answer = prompt.row.get("response") or ""
        texts = [form.format(answer) for form in _FORMS]
        ids = [material.tokenizer.encode(text, add_special_tokens=False) or [0] for text in texts]
        responses = [Response(i, [0.0] * len(i), text=text) for i, text in zip(ids, texts, strict=True)]
        groups.append(Group(prompt, responses))
    return material.scorer.score(groups)


def _best(cells: np.ndarray) -> np.ndarray:
    """(rows,) highest score of a row; NaN where none was scored."""
    filled = np.where(np.isnan(cells), -np.inf, cells).max(axis=1)
    return np.where(np.isneginf(filled), np.nan, filled)


def _constant(cells: np.ndarray) -> bool:
    known = cells[~np.isnan(cells)]
    return bool(known.size == 0 or np.all(known == known[0]))


def _mean(cells: np.ndarray) -> float | None:
    known = cells[~np.isnan(cells)]
    return float(known.mean()) if known.size else None


def _spell(value: float | None) -> str:
    return "unscored" if value is None else f"{value:.3g}"
