"""The YAML of the seed and of MindSpeed-RL, as they are, with paths changed only."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.data.settings import LEGACY, load_settings

SHARED = Path(__file__).resolve().parents[4] / "shared/fixtures"
FILES = [
    "seed/preprocess.yaml",
    "mindspeed_rl/configs/datasets/deepscaler.yaml",
    "mindspeed_rl/configs/datasets/math_17k.yaml",
]


@pytest.mark.parametrize("name", FILES)
def test_yaml_that_users_bring_is_read_as_it_is(name: str, tmp_path: Path) -> None:
    file = SHARED / name
    if not file.is_file():
        pytest.skip(f"{name} is not here")
    config, warnings = load_settings(file, [f"output_prefix={tmp_path}/out"])
    assert config.workers == 8
    assert "labels" in config.dataset_additional_keys
    assert config.map_keys is not None
    assert config.map_keys["prompt"] in ("problem", "prompt")
    assert all("tokenizer_type has no effect" in warning for warning in warnings)


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "p.yaml"
    path.write_text(f"input: a.jsonl\noutput_prefix: {tmp_path}/out\ntokenizer_name_or_path: t\n{text}")
    return path


def test_dashes_equal_underscores_in_files_and_overrides(tmp_path: Path) -> None:
    path = _write(tmp_path, "map-keys: {prompt: q}\nseq-length: 4096\nprompt-type: qwen\n")
    config, _ = load_settings(path, ["drop-duplicates=true"])
    assert (config.map_keys, config.seq_length, config.prompt_type) == ({"prompt": "q"}, 4096, "qwen")
    assert config.drop_duplicates


def test_keys_that_do_nothing_here_are_accepted_and_explained(tmp_path: Path) -> None:
    values = "".join(f"{key}: 1\n" for key in LEGACY)
    _, warnings = load_settings(_write(tmp_path, values))
    assert len(warnings) == len(LEGACY)
    assert any("p.yaml:" in w and "n_subs has no effect: rows are streamed" in w for w in warnings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("map_key: {}\n", r"p.yaml:4: .*map_key.*map_keys"),
        ("seq-length: none\n", r"p.yaml:4: seq_length"),
        ("workers: 0\n", r"workers"),
        ("interleave_probs: [0.5, 0.5]\n", "one probability for each"),
    ],
)
def test_mistakes_name_file_line_and_key(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        load_settings(_write(tmp_path, text))


def test_several_inputs_and_probabilities_may_be_text(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        f"input: a.jsonl, b.jsonl\noutput_prefix: {tmp_path}/o\ntokenizer_name_or_path: t\ninterleave_probs: 0.3,0.7\n"
    )
    config, _ = load_settings(path)
    assert (config.input, config.interleave_probs) == (["a.jsonl", "b.jsonl"], [0.3, 0.7])
    with pytest.raises(ValueError, match="add up to 1"):
        load_settings(path, ["interleave_probs=[0.5,0.6]"])


def test_a_missing_output_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no/out: the directory .*/no does not exist. Make it first"):
        load_settings(_write(tmp_path, ""), [f"output_prefix={tmp_path}/no/out"])
