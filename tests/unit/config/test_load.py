"""Loading a configuration: all problems at once, each with its place and the fix; overrides; origins."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from covey.config.load import load_config
from covey.config.schema import Config, SftRunConfig
from covey.config.yaml_tree import ConfigError

MINIMAL = """\
model:
  path: some/model
data:
  train: rows.jsonl
reward:
  functions: [{name: math}]
output_dir: runs/x
"""


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def _problems(tmp_path: Path, text: str, *overrides: str) -> dict[str, tuple[str, str]]:
    """Key -> (line or --set, reason) of every problem of MINIMAL + text."""
    with pytest.raises(ConfigError) as caught:
        load_config(_write(tmp_path, text), overrides)
    return {p.key: (p.place.rpartition(":")[2], p.reason) for p in caught.value.problems}


def test_a_minimal_file_gets_the_schema_defaults(tmp_path: Path) -> None:
    loaded = load_config(_write(tmp_path, MINIMAL))
    assert loaded.config == Config.model_validate(
        {
            "model": {"path": "some/model"},
            "data": {"train": "rows.jsonl"},
            "reward": {"functions": [{"name": "math"}]},
            "output_dir": "runs/x",
        }
    )


def test_every_value_knows_where_it_came_from(tmp_path: Path) -> None:
    path = _write(tmp_path, MINIMAL + "train:\n  lr: 1e-6\n  steps: 5\n")
    loaded = load_config(path, ["train.steps=7", "reward.functions[0].weight=2"])
    assert loaded.config.train.lr == 1e-6
    assert loaded.config.train.steps == 7
    assert loaded.origins["train.lr"] == f"{path}:9"
    assert loaded.origins["train.steps"] == "--set"
    assert loaded.origins["train.batch_size"] == "default"
    assert loaded.origins["reward.functions[0].name"] == f"{path}:6"
    assert loaded.origins["reward.functions[0].weight"] == "--set"


def test_all_problems_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    text = MINIMAL + (
        "rolout: {}\n"  # 8
        "train:\n"
        "  batch_sise: 4\n"  # 10
        "  lr: fast\n"  # 11
        "  batch_size: 10\n"  # 12
        "  kl_coef: 0.1\n"  # 13
        "algorithm:\n"
        "  mini_batch_size: 3\n"  # 15
        "rollout:\n"
        "  top_p: 2\n"  # 17
        "  temperature: 0\n"  # 18
        "seed: 1\n"
        "seed: 2\n"  # 20
    )
    problems = _problems(tmp_path, text, "device=gpu", "data.trian=x")
    assert problems["rolout"] == ("8", "unknown key; nearest known: rollout")
    assert problems["train.batch_sise"] == ("10", "unknown key; nearest known: train.batch_size")
    assert problems["train.lr"] == ("11", "needs number at least 0")
    assert problems["train.kl_coef"] == ("13", "unknown key; nearest known: algorithm.kl_coef")
    assert problems["rollout.top_p"] == ("17", "needs number above 0 and at most 1")
    assert problems["seed"][0] == "20"
    assert problems["device"] == ("--set", "needs one of: auto, cpu, cuda, npu")
    assert problems["data.trian"] == ("--set", "unknown key; nearest known: data.train")
    assert problems["train.batch_size"][0] == "12"  # the two rules over several keys are reported with the rest
    assert "algorithm.mini_batch_size=3" in problems["train.batch_size"][1]
    assert problems["rollout.temperature"][0] == "18"
    assert len(problems) == 10


def test_a_rule_is_not_judged_on_a_value_that_is_already_wrong(tmp_path: Path) -> None:
    problems = _problems(tmp_path, MINIMAL + "train: {batch_size: many}\nalgorithm: {mini_batch_size: 3}\n")
    assert list(problems) == ["train.batch_size"]  # nothing about 16 (the default) not being a multiple of 3


def test_missing_keys_are_named_with_their_meaning(tmp_path: Path) -> None:
    problems = _problems(tmp_path, "data: {}\nreward: {functions: [{weight: 2}]}\n")
    assert set(problems) == {"model.path", "data.train", "output_dir", "reward.functions[0].name"}
    assert "required key is missing" in problems["model.path"][1]
    assert "Hugging Face" in problems["model.path"][1]
    problems = _problems(tmp_path, MINIMAL.replace("reward:\n  functions: [{name: math}]\n", ""))
    assert "reward.functions" in problems[""][1] and "distillation" in problems[""][1]


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("train.lr", "1e-6", 1e-6),
        ("train.lr", '"1e-6"', 1e-6),
        ("train.steps", "1e2", 100),
        ("train.steps", '"20"', 20),
        ("model.path", "007", "007"),
        ("output_dir", "2024-05-01", "2024-05-01"),
        ("data.system", "yes", "yes"),
        ("data.system", "null", None),
        ("data.train", "[1, b]", ["1", "b"]),
        ("train.betas", "[0.9, 9.5e-1]", (0.9, 0.95)),
        ("data.shuffle", "no", False),
        ("train", "", None),
    ],
)
def test_values_are_read_as_their_field_wants(tmp_path: Path, key: str, value: str, expected: object) -> None:
    config = load_config(_write(tmp_path, MINIMAL), [f"{key}={value}"]).config
    if key == "train":  # a section whose keys are all commented out
        assert config.train == Config.model_fields["train"].get_default(call_default_factory=True)
        return
    for name in key.split("."):
        config = getattr(config, name)
    assert config == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.steps", "1.5"),
        ("train.steps", "true"),
        ("train.steps", "null"),
        ("train.steps", "0"),
        ("train.lr", ".nan"),
        ("train.lr", ".inf"),
        ("train.lr", "1:30"),
        ("train.betas", "[0.9]"),
        ("train.betas", "[0.9, 2]"),
        ("data.shuffle", "maybe"),
        ("data.train", "{a: 1}"),
        ("reward.functions", "math"),
        ("reward.functions", "[5]"),
        ("model", "5"),
        ("algorithm.entropy_coef", ".nan"),
    ],
)
def test_values_that_are_no_such_thing_are_refused(tmp_path: Path, key: str, value: str) -> None:
    problems = _problems(tmp_path, MINIMAL, f"{key}={value}")
    assert len(problems) == 1
    (place, reason), reported = next(iter(problems.values())), next(iter(problems))
    assert place == "--set"
    assert reported.startswith(key)
    assert reason.startswith("needs ")


def test_rules_and_keys_inside_lists_and_maps_of_sections_have_their_places(tmp_path: Path) -> None:
    text = MINIMAL.replace(
        "functions: [{name: math}]",
        "tasks:\n    math:\n      - {name: math, range: [1, 0]}\n    code:\n      - {nam: math}\n  functions: [math]",
    )
    problems = _problems(tmp_path, text)
    assert problems["reward.tasks.math[0].range"][0] == "8"
    assert problems["reward.tasks.code[0].nam"] == ("10", "unknown key; nearest known: reward.tasks.code[0].name")
    assert problems["reward.tasks.code[0].name"][0] == "10"
    loaded = load_config(_write(tmp_path, text.replace("range: [1, 0]", "weight: 2").replace("{nam: math}", "math")))
    assert loaded.config.reward.tasks["math"][0].weight == 2
    assert loaded.origins["reward.functions[0].name"].endswith(":11")


def test_an_override_can_repair_a_value_of_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path, MINIMAL + "train: {lr: fast}\n")
    assert load_config(path, ["train.lr=2"]).config.train.lr == 2


def test_a_file_that_is_no_map_is_refused(tmp_path: Path) -> None:
    for text in ("- a\n- b\n", "just text\n", "5\n"):
        with pytest.raises(ConfigError, match="not a map of sections"):
            load_config(_write(tmp_path, text))
    assert "model.path" in _problems(tmp_path, "# only a comment\n")


def test_names_of_registries_are_checked_by_whoever_knows_them(tmp_path: Path) -> None:
    path = _write(tmp_path, MINIMAL + "algorithm: {loss: grop}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:8.*nearest known: grpo"):
        load_config(path, choices={"algorithm.loss": ["grpo", "gspo"]})
    own = load_config(path, ["algorithm.loss=mine:loss"], choices={"algorithm.loss": ["grpo"]})
    assert own.config.algorithm.loss == "mine:loss"


def test_a_file_for_the_other_command_says_so(tmp_path: Path) -> None:
    text = "model: {path: m}\nsft: {data: d.jsonl}\noutput_dir: o\n"
    assert load_config(_write(tmp_path, text), schema=SftRunConfig).config.sft.data == "d.jsonl"
    assert "covey sft" in _problems(tmp_path, text)["sft"][1]
    with pytest.raises(ConfigError, match="covey train"):
        load_config(_write(tmp_path, MINIMAL), schema=SftRunConfig)


def test_the_report_reads_as_one_line_per_problem(tmp_path: Path) -> None:
    path = _write(tmp_path, MINIMAL + "train: {lr: fast, stebs: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).splitlines() == [
        f"{path} has 2 problems:",
        f'  {path}:8: train.lr = "fast": needs number at least 0',
        f"  {path}:8: train.stebs = 1: unknown key; nearest known: train.steps",
    ]


def test_loading_does_not_import_torch() -> None:
    code = "import sys, covey.config.load, covey.config.reference, covey.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_preset_counts_as_the_origin_of_what_it_sets_and_its_rules_are_reported(tmp_path: Path) -> None:
    path = _write(tmp_path, MINIMAL + "algorithm:\n  preset: cispo\n")
    loaded = load_config(path)
    assert loaded.config.algorithm.loss == "cispo"
    assert loaded.origins["algorithm.loss"] == "preset cispo"
    assert loaded.origins["algorithm.epochs"] == "default"
    problems = _problems(tmp_path, MINIMAL + "algorithm:\n  preset: cispo\n  dual_clip: 3\ntrain: {lr: fast}\n")
    assert set(problems) == {"train.lr", "algorithm.dual_clip"}
