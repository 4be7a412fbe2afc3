"""A dry run says what a run would start with, reads no weights, and finds what would stop it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from covey import cli
from covey.config.convert import check_file, load_any
from covey.distributed.mesh import Mesh
from covey.memory import activation_bytes, memory_per_rank, peak_bytes
from covey.models.load import load_skeleton
from covey.tools.dry_run import dry_run
from covey.tools.tiny import make_data, make_model

FIXTURES = Path(__file__).resolve().parents[4] / "shared" / "fixtures" / "mindspeed_rl"
QWEN_7B = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
QWEN_7B |= {"num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}
QWEN_7B |= {"max_position_embeddings": 131072}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tiny")
    make_model(root / "model", seed=0)
    (root / "model" / "model.safetensors").unlink()  # no weights are read
    make_data(root / "data", seed=0)
    return root


@pytest.fixture(scope="module")
def big(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json of a 7B model, with the tiny model's tokenizer."""
    root = tmp_path_factory.mktemp("big")
    for file in (tiny / "model").iterdir():
        (root / file.name).write_bytes(file.read_bytes())
    config = json.loads((root / "config.json").read_text())
    config.pop("layer_types", None)
    (root / "config.json").write_text(json.dumps(config | QWEN_7B | {"max_window_layers": 28}))
    return root


def _write(tmp_path: Path, tiny: Path, **sections: Any) -> Path:
    data: dict[str, Any] = {
        "model": {"path": str(tiny / "model")},
        "data": {"train": str(tiny / "data" / "train.jsonl"), "max_prompt_length": 32},
        "rollout": {"num_samples": 4, "max_response_length": 32},
        "reward": {"functions": ["math"], "num_workers": 0},
        "train": {"batch_size": 8},
        "output_dir": str(tmp_path / "out"),
        "device": "cpu",
    }
    for name, keys in sections.items():
        data[name] = {**data[name], **keys} if isinstance(data.get(name), dict) else keys
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(data))
    return path


def test_a_good_run_is_ready_and_nothing_is_written(tmp_path: Path, tiny: Path) -> None:
    result = dry_run(load_any(_write(tmp_path, tiny)))
    assert (result["ok"], result["problems"], result["unchecked"]) == (True, [], [])
    assert result["facts"]["Data"]["prompts"] == "400"
    assert result["facts"]["Each step"]["responses"] == "8 prompts x G 4 = 32"
    assert not (tmp_path / "out").exists()


def test_every_problem_is_found_at_once(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    sections = {
        "parallel": {"tp": 4},
        "rollout": {"max_response_length": 1000, "kv_cache_bytes": 1000},
        "reward": {"functions": ["mathh"]},
        "algorithm": {"loss": "gropo"},
    }
    result = dry_run(load_any(_write(tmp_path, tiny, **sections)))
    text = "\n".join(result["problems"])
    assert not result["ok"]
    for words in ("gropo", "'mathh' is unknown", "num_key_value_heads=2", "positions for 512", "kv_cache_bytes=1000"):
        assert words in text
    assert len(result["problems"]) == 5


def test_a_layout_that_does_not_fit_the_processes(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    result = dry_run(load_any(_write(tmp_path, tiny, parallel={"dp_replicate": 4})))
    assert ["does not divide the 6 processes" in problem for problem in result["problems"]] == [True]


def test_absent_data_is_not_a_problem_and_absent_weights_are_said(tmp_path: Path, tiny: Path) -> None:
    result = dry_run(load_any(_write(tmp_path, tiny, data={"train": "nowhere/train.jsonl"})))
    assert result["ok"]
    assert result["unchecked"] == ["data: nowhere/train.jsonl: not on this disk"]
    result = dry_run(load_any(_write(tmp_path, tiny, model={"path": str(tmp_path / "absent")})))
    assert not result["ok"]
    assert all("no such directory" in problem for problem in result["problems"])


def test_memory_of_one_rank_in_float32_is_that_of_the_real_model(tmp_path: Path, tiny: Path) -> None:
    config = load_any(_write(tmp_path, tiny)).config
    real = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny / "model"))
    optimizer = torch.optim.AdamW(real.parameters())
    real(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer.step()
    weights = sum(p.numel() * p.element_size() for p in real.parameters())
    moments = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if t.dim())
    memory = memory_per_rank(config, load_skeleton(str(tiny / "model")), Mesh(), torch.float32)
    assert (memory["weights"], memory["gradients"], memory["AdamW moments"]) == (weights, weights, moments)
    assert "fp32 masters" not in memory


def test_memory_of_a_7b_model_by_hand(tmp_path: Path, tiny: Path, big: Path) -> None:
    config = load_any(
        _write(tmp_path, tiny, model={"path": str(big)}, train={"max_tokens_per_micro_batch": 100})
    ).config
    model = load_skeleton(str(big))
    assert all(parameter.is_meta for parameter in model.parameters())
    count = 7_615_616_512  # Qwen2.5-7B's own card: 7.62B
    one = memory_per_rank(config, model, Mesh(), torch.bfloat16)
    # 2 bytes weights, 4 masters, 2 + 4 gradients, 8 moments
    names = ("weights", "fp32 masters", "gradients", "AdamW moments")
    assert [one[name] // count for name in names] == [2, 4, 6, 8]
    sixteen = memory_per_rank(config, model, Mesh(dp_shard=8, tp=2), torch.bfloat16)
    assert [sixteen.get(name, 0) * 16 // count for name in names] == [4, 0, 4, 8]
    assert sixteen["gathered for rollout"] == count
    # of a token a layer keeps for each of two norms 3584 numbers in fp32 and twice in 16 bits, (2 x 28 + 2 x 4) heads x
    # 128 with 28 log-sum-exps in fp32, and 4 x 18944
    token = 2 * 3584 * (4 + 2 + 2) + 2 * 64 * 128 + 4 * 28 + 2 * 4 * 18944
    assert activation_bytes(config, model, 1, 2) == 100 * 28 * token
    assert peak_bytes({"weights": 1, "gradients": 10, "KV cache (at most)": 100, "gathered for rollout": 5}) == 106


@pytest.mark.parametrize(("loss", "code"), [("grpo", 0), ("gropo", 2)])
def test_the_command_says_it_by_its_exit_code(
    loss: str,
    code: int,
    tmp_path: Path,
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = _write(tmp_path, tiny, algorithm={"loss": loss})
    for more in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["covey", "train", str(path), "--dry-run", *more])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code in ((None, 0) if code == 0 else (2,))
        printed = capsys.readouterr()
        if more:
            assert json.loads(printed.out)["ok"] == (code == 0)
        else:
            assert ("ready to start" in printed.err) == (code == 0)


@pytest.mark.skipif(not FIXTURES.is_dir(), reason="MindSpeed-RL's files are not beside the repository")
def test_upstreams_files_on_the_devices_they_are_made_for(
    big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file that can run, as many processes as it names devices, its own parallel sizes; a model of 32B sizes."""
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
    config = json.loads((big / "config.json").read_text()) | sizes | {"num_key_value_heads": 8, "max_window_layers": 64}
    model = tmp_path / "model"
    model.mkdir()
    for file in big.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "config.json").write_text(json.dumps(config))
    ran = 0
    for path in sorted((FIXTURES / "configs").glob("*.yaml")):
        data = yaml.safe_load(path.read_text())
        devices = data["rl_config"]["actor_resource"]["num_npus"] if "rl_config" in data else 1
        monkeypatch.setenv("WORLD_SIZE", str(devices))
        given = [f"model.path={model}", "model.dtype=bfloat16", "data.train=nowhere/rows.jsonl"]
        report = check_file(path, given)
        if report.loaded is None:
            continue
        result = dry_run(report.loaded)
        assert result["problems"] == [], path.name
        # The file with context parallelism asks for a ring.
        pp, tp = (data["actor_config"][f"{axis}_model_parallel_size"] for axis in ("pipeline", "tensor"))
        axes = {"pp": pp, "dp_shard": devices // (pp * tp), "tp": tp}
        product = " x ".join(f"{axis} {degree}" for axis, degree in axes.items() if degree > 1)
        assert result["facts"]["Device"]["processes"] == f"{product} = {devices}"
        ran += 1
    assert ran >= 6


def test_a_teacher_is_built_and_its_tokens_compared(tmp_path: Path, tiny: Path, big: Path) -> None:
    """7.6e9 parameters of 4 bytes; none on the device while they are offloaded; another tokenizer is a problem."""
    teacher = {"teacher": str(big)}
    result = dry_run(load_any(_write(tmp_path, tiny, distillation=teacher)))
    assert result["ok"], result["problems"]
    assert result["memory_bytes"]["teacher"] == pytest.approx(4 * 7.6e9, rel=0.01)
    assert str(big) in result["facts"]["Model"]["teacher"]
    result = dry_run(load_any(_write(tmp_path, tiny, distillation=teacher | {"offload": True})))
    assert "teacher" not in result["memory_bytes"]
    result = dry_run(load_any(_write(tmp_path, tiny, distillation={"teacher": str(tmp_path / "none")})))
    assert any("distillation.teacher" in problem for problem in result["problems"])


def test_a_typo_in_what_passes_is_found(tmp_path: Path, tiny: Path) -> None:
    result = dry_run(load_any(_write(tmp_path, tiny, evaluation={"pass_on": "math/anwser"})))
    assert any("did you mean 'math/answer'" in problem for problem in result["problems"])
