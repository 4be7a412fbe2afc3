"""Named objectives: what `algorithm.preset` sets. A key that the file or the command line gives wins over the preset.

Sources stand beside the formulas in docs/math.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from covey.config.yaml_tree import Tree

_NO_KL = {"kl_coef": 0.0}
_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
_GSPO = {"loss": "gspo", "advantage": "group_norm", "clip_low": 3e-4, "clip_high": 4e-4, **_NO_KL}
_PPO = {"loss": "grpo", **_CLIP}

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {
        **_PPO,
        "advantage": "group_norm",
        "aggregation": "sequence_mean",
        "kl_coef": 0.04,
        "kl_estimator": "k3",
    },
    "dapo": {
        **_PPO,
        "advantage": "group_norm",
        "aggregation": "token_mean",
        "clip_high": 0.28,
        **_NO_KL,
    },
    "dr_grpo": {**_PPO, "advantage": "group_center", "aggregation": "constant", **_NO_KL},
    "gspo": {**_GSPO, "aggregation": "sequence_mean"},
    "gspo_token": {**_GSPO, "loss": "gspo_token", "aggregation": "sequence_mean"},
    "luspo": {**_GSPO, "aggregation": "sequence_sum"},
    "cispo": {
        "loss": "cispo",
        "advantage": "group_norm",
        "aggregation": "token_mean",
        "clip_low": 1.0,
        "clip_high": 4.0,
        **_NO_KL,
    },
    "sapo": {"loss": "sapo", "advantage": "group_norm", "aggregation": "sequence_mean", **_NO_KL},
    "vespo": {"loss": "vespo", "advantage": "group_norm", "aggregation": "token_mean", **_NO_KL},
    "reinforce": {"loss": "reinforce", "advantage": "group_center", "aggregation": "token_mean", **_NO_KL},
    "rloo": {"loss": "rloo", "advantage": "rloo", "aggregation": "sequence_mean", **_CLIP, **_NO_KL},
    "reinforce_plus_plus": {**_PPO, "advantage": "batch_norm", "aggregation": "token_mean", **_NO_KL},
    "reinforce_plus_plus_baseline": {
        **_PPO,
        "advantage": "group_center_batch_norm",
        "aggregation": "token_mean",
        "kl_coef": 1e-3,
        "kl_estimator": "k2",
    },
}


def with_preset(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """The section with the preset's values under its own; unchanged without a known `preset`."""
    return PRESETS.get(str(algorithm.get("preset")), {}) | dict(algorithm)


def apply_preset(tree: Tree) -> None:
    """Put the preset's values into a file's tree, with `preset NAME` as their place."""
    section = tree.data.get("algorithm") if isinstance(tree.data, dict) else None
    if not isinstance(section, dict):
        return
    merged = with_preset(section)
    for key in merged.keys() - section.keys():
        tree.places["algorithm", key] = f"preset {section['preset']}"
    tree.data["algorithm"] = merged


def describe_preset(name: str | None, algorithm: Mapping[str, Any]) -> str:
    """One line: what the preset of this section set, and which of its keys were given otherwise."""
    if name is None:
        return "none"
    parts = [
        f"{key} {value}" if algorithm[key] == value else f"{key} {algorithm[key]} (preset {value})"
        for key, value in PRESETS[name].items()
    ]
    return f"{name}: {', '.join(parts)}"
