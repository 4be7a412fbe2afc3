"""`covey plan`: every layout is judged, the reasons are right, the command speaks by its exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from covey.cli import main
from covey.commands.plan import parse_bytes
from covey.config.schema import Config
from covey.tools.plan import Request, plan
from covey.tools.time_model import HARDWARE, Lengths

GIB = 2**30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only a config.json: 4 layers, 8 heads, 2 key heads, 0.5B parameters."""
    directory = tmp_path_factory.mktemp("model")
    Qwen2Config(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        max_position_embeddings=8192,
    ).save_pretrained(directory)
    return directory


def _sections(model: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(model)},
        "data": {"train": "none", "max_prompt_length": 512},
        "rollout": {"num_samples": 4, "max_response_length": 512, "kv_cache_bytes": GIB},
        "reward": {"functions": ["math"]},
        "train": {"batch_size": 32, "steps": 10, "max_tokens_per_micro_batch": 4096},
        "algorithm": {"mini_batch_size": 16, "epochs": 2, "kl_coef": 0.0},
        "output_dir": "none",
    }


def _plan(model: Path, *, devices: int = 8, memory: int = 64 * GIB) -> dict[str, Any]:
    config = Config.model_validate(_sections(model))
    return plan(config, Request(devices, memory, HARDWARE["910b"], Lengths(512, 512)))


def _layout(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row[axis] for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))


def test_every_layout_is_judged_once_and_uses_all_devices(model: Path) -> None:
    result = _plan(model)
    rows = [*result["layouts"], *result["too_large"], *result["not_allowed"]]
    layouts = [_layout(row) for row in rows]
    assert len(set(layouts)) == len(layouts)
    for r, s, cp, tp, pp in layouts:
        assert r * s * cp * tp * pp == 8
    assert {(1, 8, 1, 1, 1), (1, 4, 1, 2, 1), (1, 2, 1, 1, 4), (1, 1, 8, 1, 1)} <= set(layouts)


def test_layouts_that_the_heads_or_layers_forbid_say_so(model: Path) -> None:
    refused = {_layout(row): row["reason"] for row in _plan(model)["not_allowed"]}
    assert "num_key_value_heads=2" in refused[1, 2, 1, 4, 1]
    assert "4 layers" in refused[1, 1, 1, 1, 8]
    assert all(tp > 2 or pp > 4 or cp * tp > 8 for _, _, cp, tp, pp in refused)


def test_layouts_are_ranked_and_fit(model: Path) -> None:
    layouts = _plan(model)["layouts"]
    seconds = [row["seconds"]["all"] for row in layouts]
    assert seconds == sorted(seconds)
    for row in layouts:
        assert row["peak_bytes"] == max(row["phase_bytes"].values()) <= row["usable_bytes"] < 64 * GIB
        assert row["seconds"]["all"] == pytest.approx(sum(v for k, v in row["seconds"].items() if k != "all"))


def test_little_memory_leaves_the_layouts_that_cut_most_and_turns_on_what_saves(model: Path) -> None:
    much, little = _plan(model), _plan(model, memory=4 * GIB)
    assert 0 < len(little["layouts"]) < len(much["layouts"])
    best = [result["layouts"][0] for result in (much, little)]
    assert _layout(best[0]) == _layout(best[1])
    assert [row["gradient_checkpointing"] for row in best] == [False, True]
    reason = little["too_large"][0]["reason"]
    assert "usable" in reason and "largest part" in reason
    assert _plan(model, memory=GIB // 2)["layouts"] == []


def test_the_batch_is_worked_out(model: Path) -> None:
    batch = _plan(model)["batch"]
    assert batch["responses"] == "32 prompts x 4 = 128 a step"
    assert "= 81,792 a step" in batch["trained tokens"]  # 32 x (512 + 4 x 511)
    assert batch["optimizer steps"] == "2 epochs x 2 mini-batches = 4 a step, 40 in 10 steps"


def test_the_command_prints_tables_or_json_and_exits_1_when_nothing_fits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    sections = _sections(model)
    sections["model"]["path"] = "not/here"
    path.write_text(json.dumps(sections))
    command = ["covey", "plan", str(path), "--devices", "2", "--model-config", str(model)]

    def call(*more: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [*command, *more])
        code = 0
        try:
            main()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    code, text, _ = call()
    assert code == 0
    assert "Layouts that fit" in text and "gathered for rollout" in text
    code, text, _ = call("--json", "--memory", "1GiB")
    assert (code, json.loads(text)["layouts"]) == (1, [])
    code, _, error = call("--device-name", "abacus")
    assert code == 2 and "910b" in error
    code, text, _ = call("--json", "--peak-tflops", "1", "--prompt-tokens", "10", "--response-tokens", "20")
    changed = json.loads(text)
    assert (code, changed["hardware"]["peak_tflops"], changed["hardware"]["name"]) == (0, 1, "910b, changed")
    assert changed["batch"]["assumed lengths"] == "prompt 10, response 20 tokens"


@pytest.mark.parametrize(
    ("text", "size"), [("64GiB", 64 * GIB), ("80GB", 80 * 10**9), ("1.5 GiB", 3 * GIB // 2), ("7", 7)]
)
def test_amounts_of_memory(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_an_amount_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="64GiB"):
        parse_bytes("much")
