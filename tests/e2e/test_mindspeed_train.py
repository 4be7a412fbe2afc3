"""MindSpeed-RL's own files train: 2 steps on cpu, with model, data, sizes and device given on the command line.

The DAPO file also gets another verifier.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from covey import sft
from covey.config.load import LoadedConfig
from covey.config.schema import SftRunConfig
from covey.tools.tiny import make_data, make_model

CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "mindspeed_rl" / "configs"
SIZES = {
    "megatron_training.train_iters": 2,
    "megatron_training.global_batch_size": 8,
    "rl_config.mini_batch_size": 4,
    "rl_config.max_prompt_length": 32,
    "generate_config.sampling_config.max_tokens": 64,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is right now and then, and its data: without right answers there is no gradient."""
    root = tmp_path_factory.mktemp("start")
    make_model(root / "untrained", seed=0)
    files = make_data(root / "data", seed=0)
    config = SftRunConfig.model_validate(
        {
            "model": {"path": str(root / "untrained")},
            "sft": {"data": str(files.sft)},
            "train": {"steps": 120, "batch_size": 32, "lr": 4e-3, "schedule": "linear", "warmup_steps": 20},
            "output_dir": str(root / "sft"),
            "device": "cpu",
        }
    )
    sft.run(LoadedConfig(config, {}, "test"))
    return root


@pytest.mark.slow
@pytest.mark.skipif(not CONFIGS.is_dir(), reason="MindSpeed-RL's files are not beside the repository")
@pytest.mark.parametrize("name", ["grpo_qwen25_7b_A3", "grpo_qwen25_32b_A3", "dapo_qwen25_32b_A3"])
def test_upstreams_file_trains_two_steps(name: str, start: Path, tmp_path: Path) -> None:
    model = start / "sft" / "model"
    given = {"model.path": model, "data.train": start / "data" / "train.jsonl", "device": "cpu", **SIZES}
    if name.startswith("dapo"):  # its verifier asks for a line `Answer:`, which this model never writes
        given |= {"rl_config.verifier_function": "[math_17k_acc]", "rl_config.filter_groups_train_batch_size": 8}
        given |= {"rl_config.overlong_buffer": 16, "rl_config.rollout_max_tokens": 64}
    sets = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "covey", "train", str(CONFIGS / f"{name}.yaml"), *sets, "--json"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    summary = json.loads(done.stdout)
    output = tmp_path / summary["output_dir"]  # `save` of the file
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["group/zero_variance_share"] < 1
        assert line["actor/grad_norm"] > 0
        assert line["rollout/logprob_gap_max"] < 1e-3
        assert ("rollout/rounds" in line) == name.startswith("dapo")
    before, after = load_file(model / "model.safetensors"), load_file(output / "model" / "model.safetensors")
    assert any(not before[weight].equal(after[weight]) for weight in before)
