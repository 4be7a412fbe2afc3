"""A shortened quickstart: the model learns on held-out problems, and the same seed is the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from covey.config.load import load_config
from covey.tools import quickstart

SHORT = {"sft_steps": 90, "steps": 16}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("first") / "quickstart"
    return out, quickstart.run(out, seed=7, json=True, **SHORT)


@pytest.mark.slow
def test_the_held_out_reward_rises(first: tuple[Path, dict[str, Any]]) -> None:
    _, summary = first
    assert summary["heldout_reward_after"] > summary["heldout_reward_before"] + 0.05


@pytest.mark.slow
def test_the_summary_says_what_the_metrics_say(first: tuple[Path, dict[str, Any]]) -> None:
    out, summary = first
    assert json.loads((out / "summary.json").read_text()) == summary
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert summary["steps"] == lines[-1]["step"] == SHORT["steps"]
    assert summary["seconds"] > sum(line.get("timing/all", 0.0) for line in lines)
    for when, line in (("before", lines[0]), ("after", lines[-1])):
        assert summary[f"heldout_reward_{when}"] == line["eval/reward"]
        assert summary[f"pass1_{when}"] == line["eval/pass@1"]
        of_tasks = [task[f"heldout_reward_{when}"] for task in summary["tasks"].values()]
        assert sum(of_tasks) / len(of_tasks) == pytest.approx(line["eval/reward"])  # as many problems of each


@pytest.mark.slow
def test_the_same_seed_is_the_same_run_and_replaces_an_earlier_one(
    first: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, summary = first
    again = tmp_path / "quickstart"
    again.mkdir()
    (again / quickstart.MARKER).touch()
    (again / "metrics.jsonl").write_text("of an earlier run\n")
    repeated = quickstart.run(again, seed=7, json=True, **SHORT)
    assert {k: v for k, v in repeated.items() if k not in ("seconds", "model")} == {
        k: v for k, v in summary.items() if k not in ("seconds", "model")
    }
    weights, expected = (load_file(path / "model" / "model.safetensors") for path in (again, out))
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(expected[name]) for name in expected)


@pytest.mark.slow
def test_the_written_configuration_is_the_one_that_ran(first: tuple[Path, dict[str, Any]]) -> None:
    out, _ = first
    loaded = load_config(out / "grpo.yaml", ["output_dir=elsewhere"]).config
    ran = load_config(out / "config.yaml", ["output_dir=elsewhere"]).config
    assert loaded == ran
