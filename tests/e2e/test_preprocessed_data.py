"""From raw rows through `covey preprocess` to training: the seed's YAML and row, and a user's own handler."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from covey.config.load import LoadedConfig
from covey.config.schema import Config
from covey.data import preprocess
from covey.rollout.records import read_records, records_path
from covey.tools import tiny
from covey.trainer import train

REPO = Path(__file__).parents[2]
SEED = REPO.parent / "shared" / "fixtures" / "seed"
ROW = {
    "problem": "12+7=",
    "answer": "<think>1+1</think><answer>\\boxed{19}</answer>",
    "task": "math",
    "labels": [1.0],
}


@pytest.fixture
def material(tmp_path: Path) -> Path:
    tiny.make_model(tmp_path / "model", seed=0)
    return tmp_path


def _train(material: Path, prefix: Path, reward: str) -> list[dict]:
    """Two steps on the preprocessed data; the rows as the reward saw them come back through the records."""
    (material / "reward.py").write_text(reward)
    config = Config.model_validate(
        {
            "model": {"path": str(material / "model")},
            "data": {"train": str(prefix), "prompt_key": "problem"},
            "rollout": {"num_samples": 2, "max_response_length": 4},
            "reward": {"functions": [{"name": f"{material / 'reward.py'}:seen"}], "on_error": "raise"},
            "train": {"steps": 2, "batch_size": 2},
            "output_dir": str(material / "run"),
            "device": "cpu",
        }
    )
    train(LoadedConfig(config, {}, "test"), quiet=True)
    groups = read_records(records_path(material / "run", 2)).groups
    return [group.prompt.row for group in groups]


def _preprocess(material: Path, settings: dict, rows: list[dict], **changes: object) -> Path:
    (material / "rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    (material / "data").mkdir()
    settings |= {
        "input": str(material / "rows.jsonl"),
        "output_prefix": str(material / "data" / "prepared"),
        "tokenizer_name_or_path": str(material / "model"),
        "workers": 1,
    }
    (material / "preprocess.yaml").write_text(yaml.safe_dump(settings | changes, allow_unicode=True))
    preprocess.run(material / "preprocess.yaml", quiet=True)
    return material / "data" / "prepared"


@pytest.mark.skipif(not SEED.exists(), reason="needs the seed's files in ../shared, which a clone does not have")
def test_the_seeds_yaml_and_row_preprocess_and_train(material: Path) -> None:
    settings = yaml.safe_load((SEED / "preprocess.yaml").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (SEED / "sample.jsonl").read_text(encoding="utf-8").splitlines()]
    prefix = _preprocess(material, settings, rows)
    reward = (
        "def seen(responses, rows, config):\n"
        "    assert all(row['labels'] == [1.0] and row['task'] == 'math' for row in rows), rows\n"
        "    assert all('78.54' in row['response'] for row in rows), rows\n"
        "    return [float(len(r)) for r in responses]\n"
    )
    trained_on = _train(material, prefix, reward)
    assert trained_on[0]["prompt"] == rows[0]["problem"]


def test_a_custom_handlers_field_reaches_the_reward(material: Path) -> None:
    """The reward itself asserts what it is given; on_error: raise makes a failure end the run."""
    settings = {
        "handler_name": f"{REPO / 'examples' / 'handlers' / 'task_aware.py'}:TaskAwareInstructionHandler",
        "prompt_type": "empty",
        "map_keys": {"prompt": "problem", "response": "answer", "system": ""},
        "dataset_additional_keys": ["labels", "task"],
    }
    prefix = _preprocess(material, settings, [ROW, {**ROW, "problem": "3+4=", "task": "code"}])
    tokenizer = tiny.make_tokenizer()
    expected = {task: tokenizer.encode(task, add_special_tokens=False) for task in ("math", "code")}
    reward = (
        f"EXPECTED = {expected!r}\n"
        "def seen(responses, rows, config):\n"
        "    assert all(row['task_ids'] == EXPECTED[row['task']] for row in rows), rows\n"
        "    return [float(len(r)) for r in responses]\n"
    )
    trained_on = _train(material, prefix, reward)
    assert {row["task"] for row in trained_on} == {"math", "code"}
