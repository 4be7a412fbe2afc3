"""verl and TRL: the keys that have a counterpart. Best effort; every key's row says what becomes of it.

verl: YAML, or a text file of its command-line overrides (`data.train_files=x`, one a line, a trailing backslash is
dropped). TRL: GRPOConfig's arguments as a YAML or JSON map. Sources: verl 0.10 and TRL 1.16.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

from covey.config.rules import Conversion, Finding, apply_table, judge
from covey.config.trl import DEFAULTS as TRL_DEFAULTS
from covey.config.trl import TRL
from covey.config.verl import IGNORED, VERL, set_reward
from covey.config.yaml_tree import Tree, apply_override, dotted

_VERL_SECTIONS = ("actor_rollout_ref", "trainer")
_TRL_NAMES = frozenset({"num_generations", "max_completion_length", "per_device_train_batch_size", "loss_type", "beta"})


def peer_of(data: Any) -> Literal["verl", "trl"] | None:
    """Whose configuration a map is."""
    if not isinstance(data, dict):
        return None
    if any(section in data for section in _VERL_SECTIONS):
        return "verl"
    nested = sum(isinstance(value, dict) for value in data.values())
    return "trl" if len(_TRL_NAMES & set(data)) >= 2 and nested <= 2 else None


def read_override_list(path: str | Path) -> Tree | None:
    """The tree of a file that is a list of `key.path=value`; None for any other file."""
    file = Path(path)
    if not file.is_file() or file.suffix in (".yaml", ".yml", ".json"):
        return None
    tree = Tree(str(path), {})
    for number_, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        text = line.strip().removesuffix("\\").strip().removesuffix("$@").strip().lstrip("+")
        if not text or text.startswith("#"):
            continue
        found = re.match(r"(?:.*\s)?((?:[a-z_]\w*\.)+\w+)=(.*)$", text)
        if found is None:
            continue  # the command of a launch script
        key, value = found.group(1), os.path.expandvars(found.group(2).strip().strip("'\""))
        apply_override(tree, f"{key}={value}")
        tree.places = {p: (f"{path}:{number_}" if place == "--set" else place) for p, place in tree.places.items()}
    return tree if tree.data else None


def convert_peer(tree: Tree, dialect: Literal["verl", "trl"] | str) -> Conversion:
    """Judge every key of a verl or TRL configuration."""
    run = Conversion({}, {}, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    run.places = {dotted(path): place for path, place in tree.places.items()}
    given = dict(_leaves(tree.data, "")) if dialect == "verl" else dict(tree.data)
    run.values = {dialect: given}
    if dialect == "verl":
        judged = {k: v for k, v in given.items() if k in VERL or not k.startswith(tuple(IGNORED))}
        for key in given.keys() - judged.keys():
            why = next(why for prefix, why in IGNORED.items() if key.startswith(prefix))
            run.note(Finding("no effect", why), key, given[key])
        apply_table(VERL, judged, "", run)
        set_reward(given, run)
    else:
        for key, value in TRL_DEFAULTS.items():
            if key not in given:
                run.current = f"TRL's default of {key}"
                judge(TRL[key], value, run)
        apply_table(TRL, given, "", run)
    return run


def _leaves(data: Any, prefix: str) -> list[tuple[str, Any]]:
    if isinstance(data, dict) and data:
        return [leaf for key, value in data.items() for leaf in _leaves(value, f"{prefix}{key}.")]
    return [(prefix.removesuffix("."), data)]
