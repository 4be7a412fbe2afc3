"""docs/math.md names real functions and leaves out no loss, advantage, estimator, aggregation, correction or preset."""

import importlib
import re
from pathlib import Path

import pytest

from covey.algorithm.aggregation import AGGREGATIONS
from covey.algorithm.correction import CORRECTIONS
from covey.algorithm.kl import KL_ESTIMATORS
from covey.algorithm.losses import LOSSES
from covey.config.presets import PRESETS
from covey.config.schema import AlgorithmConfig
from covey.credit import ADVANTAGE_NAMES

TEXT = (Path(__file__).parents[2] / "docs" / "math.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(covey\.[\w.]+)`", TEXT)) - {"covey.algorithm"})


@pytest.mark.parametrize("name", NAMED)
def test_named_function_exists(name: str) -> None:
    module, _, function = name.rpartition(".")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Losses", LOSSES),
        ("Advantages", ADVANTAGE_NAMES),
        ("KL", KL_ESTIMATORS),
        ("Aggregation", AGGREGATIONS),
        ("Rollout correction", CORRECTIONS),
        ("Presets", PRESETS),
    ],
)
def test_every_name_has_its_row_and_no_other_has_one(heading: str, names: list[str]) -> None:
    section = re.search(rf"^## {heading}.*?(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert section is not None
    assert sorted(re.findall(r"^\| `(\w+)` \|", section[0], re.MULTILINE)) == sorted(names)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_row_says_what_the_preset_sets(name: str) -> None:
    row = f"| `{name}` | {', '.join(f'{key} {value}' for key, value in PRESETS[name].items())} |"
    assert row in TEXT


def test_settings_it_names_are_fields() -> None:
    named = set(re.findall(r"`algorithm\.(\w+)`", TEXT))
    assert named and named <= AlgorithmConfig.model_fields.keys()
