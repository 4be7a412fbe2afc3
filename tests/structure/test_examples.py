"""Every configuration that the repository shows is valid as it stands, and so are the rewards it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.config.load import load_tree, schema_of, validate_tree
from covey.config.schema import Config
from covey.rewards.runner import Scorer

ROOT = Path(__file__).parents[2]
FILES = [*sorted((ROOT / "configs").glob("*.yaml")), ROOT / "examples" / "smollm2" / "grpo.yaml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shown_configuration_is_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    tree = load_tree(path)
    config = validate_tree(tree, schema_of(tree)).config
    if isinstance(config, Config):
        Scorer(config.reward.model_copy(update={"num_workers": 0})).close()
