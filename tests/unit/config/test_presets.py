"""Presets: what they set, what wins over them, and that the table and the schema agree."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from covey.algorithm.advantages import ADVANTAGES
from covey.algorithm.losses import LOSSES
from covey.config.load import load_config
from covey.config.presets import PRESETS, describe_preset
from covey.config.schema import AlgorithmConfig

RUN = """
model: {{path: somewhere}}
data: {{train: rows.jsonl}}
reward: {{functions: [{{name: math}}]}}
output_dir: out
algorithm: {{{algorithm}}}
"""


def load(tmp_path: Path, algorithm: str, overrides: tuple[str, ...] = ()):
    file = tmp_path / "run.yaml"
    file.write_text(RUN.format(algorithm=algorithm))
    return load_config(file, overrides)


def test_schema_names_exactly_the_presets() -> None:
    literal, none = get_args(AlgorithmConfig.model_fields["preset"].annotation)
    assert set(get_args(literal)) == set(PRESETS) and none is type(None)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_valid_and_sets_its_values(name: str) -> None:
    config = AlgorithmConfig.model_validate({"preset": name})
    assert {key: getattr(config, key) for key in PRESETS[name]} == PRESETS[name]
    assert config.loss in LOSSES and config.advantage in ADVANTAGES


def test_file_and_command_line_win_over_the_preset(tmp_path: Path) -> None:
    loaded = load(tmp_path, "preset: gspo, clip_low: 0.1", ("algorithm.clip_high=0.3",))
    algorithm = loaded.config.algorithm
    assert (algorithm.loss, algorithm.clip_low, algorithm.clip_high) == ("gspo", 0.1, 0.3)
    origins = {key: loaded.origins[f"algorithm.{key}"] for key in ("loss", "clip_low", "clip_high", "entropy_coef")}
    assert origins["loss"] == "preset gspo"
    assert origins["clip_low"].endswith("run.yaml:6")
    assert origins["clip_high"] == "--set"
    assert origins["entropy_coef"] == "default"


def test_preset_from_the_command_line_applies(tmp_path: Path) -> None:
    loaded = load(tmp_path, "clip_low: 0.1", ("algorithm.preset=dr_grpo",))
    assert loaded.config.algorithm.aggregation == "constant"
    assert loaded.config.algorithm.clip_low == 0.1


def test_effective_configuration_loads_back_unchanged(tmp_path: Path) -> None:
    algorithm = load(tmp_path, "preset: cispo, clip_high: 2").config.algorithm
    assert AlgorithmConfig.model_validate(algorithm.model_dump()) == algorithm


def test_unknown_preset_is_an_error_that_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"run.yaml:6.*algorithm\.preset"):
        load(tmp_path, "preset: grop")


def test_description_says_what_was_set_and_what_was_overridden() -> None:
    config = AlgorithmConfig.model_validate({"preset": "dapo", "clip_high": 0.5})
    text = describe_preset(config.preset, config.model_dump())
    assert text.startswith("dapo: loss grpo, clip_low 0.2, clip_high 0.5 (preset 0.28), advantage group_norm")
    assert describe_preset(None, AlgorithmConfig().model_dump()) == "none"


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("preset: gspo, sequence_ratio: true", "sequence_ratio=True has no effect with loss=gspo"),
        ("loss: sapo, dual_clip: 3", r"dual_clip=3(\.0)? has no effect with loss=sapo"),
        ("kl_target: 0.1", "kl_target=0.1 with kl_coef=0"),
        ("kl_in_reward: true", "kl_in_reward=True with kl_coef=0"),
        ("kl_coef: 0.1, kl_in_reward: true, advantage: gdpo", "not gdpo"),
        ("rollout_ratio_low: 0.5", "rollout_ratio_low=0.5 has no effect with rollout_correction=none"),
    ],
)
def test_settings_without_an_effect_are_errors(tmp_path: Path, algorithm: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, algorithm)
