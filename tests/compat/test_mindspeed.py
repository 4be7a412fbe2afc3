"""MindSpeed-RL's files, of any age, and the seed's: every key judged, the meaning kept, obstacles named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from covey.config.convert import Report, check_file, converted_yaml, load_any, report_text
from covey.config.load import load_config
from covey.config.mindspeed import GENERATE, RL, SAMPLING
from covey.config.mindspeed_megatron import MEGATRON
from covey.config.yaml_tree import ConfigError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "fixtures"
FIXTURES = SHARED / "mindspeed_rl"
needs_fixtures = pytest.mark.skipif(not FIXTURES.is_dir(), reason="MindSpeed-RL's files are not beside the repository")

TINY: dict[str, Any] = {
    "megatron_training": {
        "stage": "ray_grpo",
        "tokenizer_name_or_path": "./model",
        "global_batch_size": 32,
        "train_iters": 5,
        "data_path": "./rows.jsonl",
        "seq_length": 2048,
    },
    "actor_config": {"micro_batch_size": 4, "lr": "1e-6", "lr_decay_style": "constant", "save": "./out"},
    "rl_config": {
        "mini_batch_size": 16,
        "n_samples_per_prompt": 8,
        "max_prompt_length": 1024,
        "init_kl_coef": 0.001,
        "verifier_function": ["acc", "strict_format"],
        "verifier_weight": [1.0, 0.5],
    },
    "generate_config": {"sampling_config": {"max_tokens": 512, "temperature": 1.0, "top_k": -1}},
}


def _write(tmp_path: Path, **sections: dict[str, Any]) -> Path:
    """TINY with keys changed; None removes a key."""
    data = json.loads(json.dumps(TINY))
    for section, keys in sections.items():
        data.setdefault(section, {}).update(keys)
        data[section] = {key: value for key, value in data[section].items() if value is not None}
    path = tmp_path / "upstream.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def _verdicts(report: Report) -> dict[str, str]:
    return {finding.key: finding.verdict for finding in report.findings}


def _reason(report: Report, key: str) -> str:
    return next(finding.reason for finding in report.findings if finding.key == key)


def _files() -> list[Path]:
    patterns = ("configs/*.yaml", "old_schema/*.yaml", "tests/st/configs/*.yaml")
    return sorted(path for pattern in patterns for path in FIXTURES.glob(pattern))


def _leaves(value: Any, prefix: str = "") -> set[str]:
    if isinstance(value, dict):
        return {leaf for key, item in value.items() for leaf in _leaves(item, f"{prefix}{key.replace('-', '_')}.")}
    return {prefix.removesuffix(".")}


@needs_fixtures
@pytest.mark.parametrize("path", _files(), ids=lambda path: path.stem)
def test_every_key_of_every_shipped_file_gets_a_verdict(path: Path) -> None:
    report = check_file(path)
    judged = {finding.key for finding in report.findings}
    whole = ("rl_config.actor_resource", "rl_config.reference_resource", "rl_config.reward_resource")
    for leaf in _leaves(yaml.safe_load(path.read_text())):
        parent = leaf.rpartition(".")[0]
        section = leaf.partition(".")[0]
        assert leaf in judged or parent in judged or section in judged or leaf == "defaults" or parent in whole, leaf
    assert "unknown" not in set(_verdicts(report).values())
    assert all(finding.reason for finding in report.findings)
    assert report.sentence in report_text(report)
    json.dumps(report.as_dict())


@needs_fixtures
def test_which_shipped_files_run() -> None:
    verdicts = {path.stem: check_file(path).verdict for path in _files()}
    cannot = {name for name, verdict in verdicts.items() if verdict == "cannot"}
    assert {name for name in verdicts if name.startswith(("ppo_", "dpo_", "test_ppo_"))} <= cannot
    assert {"dapo_qwen25_7b_A2_multi_turn", "grpo_trainer_qwen25_7b"} <= cannot  # tools; neural reward model
    for name in ("grpo_qwen25_7b_A3", "grpo_qwen25_32b_A2", "grpo_qwen25_32b_A3", "dapo_qwen25_32b_A3"):
        assert name not in cannot


@needs_fixtures
def test_the_lora_file_runs_with_its_adapter() -> None:
    report = check_file(FIXTURES / "configs/grpo_lora_qwen25_32b_A2.yaml")
    assert report.verdict != "cannot"
    assert report.loaded is not None
    lora = report.loaded.config.lora
    assert (lora.rank, lora.alpha) == (128, 128)
    assert set(lora.target_modules) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    verdicts = _verdicts(report)
    assert verdicts["rl_config.share_backbone"] == "honoured"
    assert not any(verdicts[key] in ("not supported", "unknown") for key in verdicts if "lora" in key)


@needs_fixtures
def test_the_7b_file_means_what_upstream_means_by_it() -> None:
    config = load_any(FIXTURES / "configs/grpo_qwen25_7b_A3.yaml").config
    assert config.model.path == "./Qwen2.5-7B"
    assert config.data.train == "./dataset/deepscaler/data"
    assert (config.train.batch_size, config.rollout.num_samples, config.train.steps) == (32, 8, 500)
    assert config.algorithm.mini_batch_size is None  # 32 prompts, as many as the batch
    assert (config.train.lr, config.train.schedule, config.train.betas) == (1e-6, "constant", (0.9, 0.95))
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.2)
    assert (config.algorithm.kl_coef, config.algorithm.kl_estimator) == (0.001, "low_var_kl")
    assert (config.data.max_prompt_length, config.rollout.max_response_length) == (2048, 2048)
    assert [(f.name, f.weight) for f in config.reward.functions] == [("math_17k_acc", 1.0)]
    assert (config.seed, config.data.shuffle, config.checkpoint.every) == (1, True, 100)
    assert config.logging.tensorboard is True


@needs_fixtures
def test_the_files_run_with_paths_sizes_and_device_given_on_the_command_line() -> None:
    overrides = [
        "model.path=./tiny",
        "data.train=rows.jsonl",
        "train.steps=2",
        "rl_config.mini_batch_size=2",
        "megatron_training.global_batch_size=4",
        "device=cpu",
    ]
    for name in ("grpo_qwen25_7b_A3", "grpo_qwen25_32b_A3"):
        config = load_any(FIXTURES / f"configs/{name}.yaml", overrides).config
        assert (config.model.path, config.model.tokenizer) == ("./tiny", None)  # the tokenizer comes with the model
        assert (config.train.steps, config.device) == (2, "cpu")
        assert (config.train.batch_size, config.algorithm.mini_batch_size) == (4, 2)


@needs_fixtures
def test_the_seeds_file_with_model_and_data_given() -> None:
    path = SHARED / "seed/train.yaml"
    report = check_file(path)
    assert report.verdict == "cannot"
    assert {problem.key for problem in report.problems} == {"model.path", "data.train"}
    report = check_file(path, ["model.path=m", "data.train=d.jsonl"])
    assert report.verdict == "differs"  # COC_ENABLED, and sampling that upstream would sharpen
    assert report.loaded is not None
    config = report.loaded.config
    assert (config.data.max_prompt_length, config.rollout.max_response_length) == (8192, 4096)
    assert (config.train.batch_size, config.rollout.num_samples, config.train.steps) == (16, 4, 5000)
    assert (config.rollout.temperature, config.rollout.top_k) == (1.0, 0)
    verdicts = _verdicts(report)
    assert verdicts["rl_config.gamma"] == verdicts["rl_config.lam"] == "no effect"
    assert verdicts["rl_config.clip_param"] == "honoured"
    assert verdicts["runtime_env.COC_ENABLED"] == "not supported"
    assert "TASK_QUEUE_ENABLE" in os.environ or report.loaded.environment["TASK_QUEUE_ENABLE"] == "2"


def test_dashes_equal_underscores_and_unknown_keys_are_named_all_at_once(tmp_path: Path) -> None:
    path = _write(tmp_path, actor_config={"min-lr": "1e-7", "lrr": 1}, rl_config={"clip_ration": 0.3})
    report = check_file(path)
    assert report.verdict == "cannot"
    assert _verdicts(report)["actor_config.min_lr"] == "honoured"
    assert _reason(report, "actor_config.lrr") == "unknown key; nearest known: actor_config.lr"
    assert _reason(report, "rl_config.clip_ration") == "unknown key; nearest known: rl_config.clip_ratio"
    with pytest.raises(ConfigError, match=r"upstream\.yaml:\d+: actor_config\.lrr"):
        load_any(path)


def test_places_are_lines_of_the_users_file(tmp_path: Path) -> None:
    path = _write(tmp_path)
    loaded = load_any(path)
    lines = path.read_text().splitlines()
    for native, text in (("train.steps", "train_iters: 5"), ("train.lr", "lr: 1e-6"), ("rollout.top_p", None)):
        place = loaded.origins[native]
        if text is None:
            assert place == "default"
        else:
            assert text in lines[int(place.rpartition(":")[2]) - 1]
    assert loaded.origins["train.betas"] == "MindSpeed-RL's default of adam_beta2"


def test_mini_batches_are_prompts_now_and_were_responses_in_the_old_schema(tmp_path: Path) -> None:
    new = load_any(_write(tmp_path)).config
    assert new.algorithm.mini_batch_size == 16
    old = load_any(_write(tmp_path, rl_config={"mini_batch_size": 128, "experience_count": 4})).config
    assert old.algorithm.mini_batch_size == 16
    uneven = check_file(_write(tmp_path, rl_config={"mini_batch_size": 100, "experience_count": 4}))
    assert uneven.verdict == "cannot"
    assert "100 / 8" in uneven.sentence


def test_dapo_clips_higher_and_has_no_kl_and_grpo_ignores_its_keys(tmp_path: Path) -> None:
    keys = {"clip_higher_enable": True, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "token_level_loss": False}
    dapo = load_any(_write(tmp_path, megatron_training={"stage": "ray_dapo"}, rl_config=keys)).config.algorithm
    assert (dapo.clip_low, dapo.clip_high, dapo.kl_coef, dapo.aggregation) == (0.2, 0.28, 0.0, "sequence_mean")
    grpo = load_any(_write(tmp_path, rl_config={**keys, "clip_ratio": 0.1})).config.algorithm
    assert (grpo.clip_low, grpo.clip_high, grpo.kl_coef, grpo.aggregation) == (0.1, 0.1, 0.001, "token_mean")


def test_dynamic_sampling_and_the_penalty_for_length(tmp_path: Path) -> None:
    keys = {
        "filter_groups_enable": True,
        "filter_groups_metric": "acc",
        "filter_groups_max_batches": 3,
        "filter_groups_train_batch_size": 16,
        "mini_batch_size": 8,
        "verifier_function": ["acc"],
        "verifier_weight": [1.0],
        "overlong_buffer_enable": True,
        "overlong_buffer": 128,
        "overlong_buffer_penalty_factor": 0.5,
        "rollout_max_tokens": 512,
    }
    dapo = _write(tmp_path, megatron_training={"stage": "ray_dapo"}, rl_config=keys)
    report = check_file(dapo)
    assert report.verdict == "runs"
    config = load_any(dapo).config
    assert (config.algorithm.max_rounds, config.train.batch_size, config.algorithm.mini_batch_size) == (3, 16, 8)
    assert (config.algorithm.overlong_buffer, config.algorithm.overlong_penalty) == (128, 0.5)
    endless = _write(
        tmp_path, megatron_training={"stage": "ray_dapo"}, rl_config={**keys, "filter_groups_max_batches": -1}
    )
    assert check_file(endless).sentence == "runs with 1 difference"
    grpo = load_any(_write(tmp_path, rl_config=keys)).config
    assert (grpo.algorithm.max_rounds, grpo.train.batch_size, grpo.algorithm.overlong_buffer) == (1, 32, 128)


@pytest.mark.parametrize(
    ("world", "sizes", "tp", "words"),
    [
        (16, {"tensor_model_parallel_size": 2, "data_parallel_size": 8}, 2, ""),
        (16, {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 4}, 4, ""),
        (8, {"tensor_model_parallel_size": 2, "context_parallel_size": 4}, 2, ""),
        (8, {"tensor_model_parallel_size": 2, "data_parallel_size": 8}, None, "= 16, but 8 processes run"),
        (6, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, None, "= 4 does not divide the 6"),
        (1, {"tensor_model_parallel_size": 2, "data_parallel_size": 8}, 1, ""),
    ],
)
def test_parallel_sizes_are_checked_against_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, sizes: dict[str, int], tp: int | None, words: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    report = check_file(_write(tmp_path, parallel_config=sizes, megatron_training={"sequence_parallel": True}))
    if tp is None:
        assert report.verdict == "cannot"
        assert words in report.sentence
        return
    assert report.verdict == "runs"
    assert report.loaded is not None
    parallel = report.loaded.config.parallel
    assert (parallel.tp, parallel.sequence_parallel) == (tp, tp > 1)
    assert parallel.cp == sizes.get("context_parallel_size", 1)
    assert parallel.pp == (sizes.get("pipeline_model_parallel_size", 1) if world > 1 else 1)
    ring = {**sizes, "context_parallel_algo": "megatron_cp_algo"}  # not available: those ranks train on other rows
    assert load_any(_write(tmp_path, parallel_config=ring)).config.parallel.cp == 1


@pytest.mark.parametrize(
    ("keys", "chunks", "layers"),
    [
        ({"num_layer_list": "7,9,8,4"}, 1, [7, 9, 8, 4]),
        ({"num_layers": 32, "num_layers_per_virtual_pipeline_stage": 2}, 4, None),
        # 28 layers and 4 empty ones, numbers 3, 9, 16 and 31, in 4 stages of 8
        ({"num_layers": 32, "noop_layers": "3,9,16,31"}, 1, [7, 7, 7, 7]),
        ({"num_layers": 32, "noop_layers": "0,31", "num_layers_per_virtual_pipeline_stage": 4}, 2, [3, *[4] * 6, 3]),
    ],
)
def test_layers_of_stages_and_virtual_stages_are_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], chunks: int, layers: list[int] | None
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    sizes = {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 2}
    loaded = load_any(_write(tmp_path, parallel_config=sizes, megatron_training=keys))
    parallel = loaded.config.parallel
    assert (parallel.pp, parallel.pp_chunks, parallel.pp_layers) == (4, chunks, layers)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_layer_list": "7,9,8"}, "3 numbers for 4 stages"),
        ({"num_layers": 30, "num_layers_per_virtual_pipeline_stage": 2}, "30 is not a multiple of pipeline 4 x 2"),
        ({"noop_layers": "3"}, "num_layers is not given"),
    ],
)
def test_stages_that_cannot_be_placed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], words: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    sizes = {"pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 2}
    report = check_file(_write(tmp_path, parallel_config=sizes, megatron_training=keys))
    assert report.verdict == "cannot"
    assert words in report.sentence


def test_upstreams_verifiers_are_registered_rewards() -> None:
    from covey.config.mindspeed import VERIFIERS
    from covey.rewards.base import REWARDS

    assert set(VERIFIERS) <= set(REWARDS)


def test_metric_names_follow_the_stage(tmp_path: Path) -> None:
    grpo = load_any(_write(tmp_path, rl_config={"log_max_throughput": True})).config.logging
    assert (grpo.names, grpo.longest_in_tps) == ("mindspeed_grpo", True)
    dapo = load_any(_write(tmp_path, megatron_training={"stage": "ray_dapo"})).config.logging
    assert (dapo.names, dapo.longest_in_tps) == ("mindspeed_dapo", False)


def test_verifier_settings_that_upstream_ignores_have_an_effect(tmp_path: Path) -> None:
    reward = load_any(_write(tmp_path, rl_config={"verifier_parallel": 4, "verifier_timeout": 120})).config.reward
    assert (reward.num_workers, reward.timeout_s) == (4, 120.0)


def test_the_kl_penalty_that_does_not_penalise_is_said_to_be_so(tmp_path: Path) -> None:
    report = check_file(_write(tmp_path, rl_config={"kl_penalty": "kl"}))
    assert "zero mean" in _reason(report, "rl_config.kl_penalty")
    assert report.loaded is not None
    assert report.loaded.config.algorithm.kl_estimator == "k1"
    assert check_file(_write(tmp_path, rl_config={"kl_penalty": "full"})).verdict == "cannot"
    assert check_file(_write(tmp_path, rl_config={"kl_penalty": "full", "init_kl_coef": 0})).verdict == "runs"


@pytest.mark.parametrize(
    ("section", "keys", "words"),
    [
        ("megatron_training", {"stage": "ray_ppo"}, "critic"),
        ("megatron_training", {"stage": "dpo"}, "preference pairs"),
        ("megatron_training", {"stage": "ray_grpoo"}, "known: ray_grpo"),
        ("rl_config", {"multi_turn_enable": True}, "tool calls"),
        ("rl_config", {"is_multimodal": True}, "multimodal"),
        ("rl_config", {"rule_reward": False}, "neural reward model"),
        ("rl_config", {"verifier_function": ["ac", "format"]}, "no reward function ac"),
        ("rl_config", {"verifier_weight": [1.0]}, "2 functions but verifier_weight"),
        ("rl_config", {"clip_ratio": "wide"}, "cannot be read"),
        ("rl_config", {"n_samples_per_prompt": 1}, "at least 2 responses"),
        ("actor_config", {"lr_decay_style": "inverse-square-root"}, "known: constant, linear, cosine"),
    ],
)
def test_what_cannot_run_says_why_in_one_paragraph(
    tmp_path: Path, section: str, keys: dict[str, Any], words: str
) -> None:
    report = check_file(_write(tmp_path, **{section: keys}))
    assert report.verdict == "cannot"
    assert report.sentence.startswith("cannot run: ")
    assert words in report.sentence
    assert "\n" not in report.sentence


def test_hydra_defaults_are_found_beside_the_file_and_in_config_dirs(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "model").mkdir(parents=True)
    (elsewhere / "model/small.yaml").write_text("small:\n  hidden_size: 64\n  norm_epsilon: 1e-6\nother:\n  bogus: 1\n")
    (elsewhere / "base.yaml").write_text("rl_config:\n  epochs: 3\n  clip_ratio: 0.3\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"hidden_size": 32, "rms_norm_eps": 1e-6}))
    path = _write(
        tmp_path,
        megatron_training={"model": "small", "tokenizer_name_or_path": str(tmp_path / "model")},
        rl_config={"clip_ratio": 0.1},
    )
    path.write_text("defaults:\n  - base\n  - model:\n      - small\n" + path.read_text())
    report = check_file(path, config_dirs=[elsewhere])
    assert report.loaded is not None
    assert report.loaded.config.algorithm.epochs == 3
    assert report.loaded.config.algorithm.clip_low == 0.1  # the file's own key goes before the one it builds on
    assert _reason(report, "small.hidden_size") == "the checkpoint has hidden_size = 32, which is used"
    assert _reason(report, "small.norm_epsilon") == "equals rms_norm_eps of the checkpoint"
    assert "unknown" not in _verdicts(report).values()  # blocks of other models are not this run's
    assert check_file(path).verdict == "cannot"  # base.yaml is nowhere to be found


def test_a_megatron_checkpoint_is_recognised_and_a_hugging_face_one_is_used(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    (weights / "iter_0000100" / "mp_rank_00").mkdir(parents=True)
    path = _write(tmp_path, actor_config={"load": str(weights)})
    report = check_file(path)
    assert report.verdict == "cannot"
    assert "Megatron-core checkpoint" in report.sentence
    assert "--set model.path=./model" in report.sentence
    assert check_file(path, ["model.path=./model"]).verdict == "runs"
    (weights / "config.json").write_text("{}")
    model = load_any(path).config.model
    assert (model.path, model.tokenizer) == (str(weights), "./model")


def test_runtime_env_becomes_text_and_the_shell_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TASK_QUEUE_ENABLE", raising=False)
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "99")
    path = _write(
        tmp_path,
        runtime_env={"env_vars": {"TASK_QUEUE_ENABLE": 2, "HCCL_CONNECT_TIMEOUT": 1800, "USING_LCCL_COM": False}},
        rl_config={"hccl_buffersize": 64, "runtime_env_path": "env.yaml"},
    )
    (tmp_path / "env.yaml").write_text("env_vars:\n  NCCL_DEBUG: WARN\n  RAY_X: '1'\n")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    assert load_any(path).environment == {
        "TASK_QUEUE_ENABLE": "2",
        "USING_LCCL_COM": "false",
        "HCCL_BUFFSIZE": "64",
        "NCCL_DEBUG": "WARN",
    }


def test_the_converted_file_is_the_same_run(tmp_path: Path) -> None:
    path = _write(tmp_path)
    report = check_file(path)
    native = tmp_path / "native.yaml"
    native.write_text(converted_yaml(report))
    assert report.loaded is not None
    assert load_config(native).config == report.loaded.config
    text = native.read_text()
    assert "steps: 5" in text
    assert "# megatron_training.train_iters (line" in text


def test_overrides_take_the_files_keys_and_coveys(tmp_path: Path) -> None:
    path = _write(tmp_path)
    config = load_any(path, ["rl_config.n_samples_per_prompt=4", "train.lr=3e-5", "actor_config.min_lr=1e-7"]).config
    assert (config.rollout.num_samples, config.train.lr, config.train.min_lr) == (4, 3e-5, 1e-7)
    with pytest.raises(ConfigError, match=r"--set: rl_config\.n_sample"):
        load_any(path, ["rl_config.n_sample_per_prompt=4"])


def test_every_native_key_the_tables_set_exists() -> None:
    """A renamed schema field is found without a file that uses it."""
    from covey.config.fields import list_fields
    from covey.config.rules import Conversion
    from covey.config.schema import Config

    known = {item.key for item in list_fields(Config)} | {"reward.functions"}
    tables = {"megatron_training": MEGATRON, "rl_config": RL, "generate_config": GENERATE, "sampling_config": SAMPLING}
    for section, table in tables.items():
        for key, rule in table.items():
            for value in (1, 0.5, True, "constant", "low_var_kl", "ray_grpo", ["acc"]):
                run = Conversion({section: {key: value}}, {"rl_config": {"n_samples_per_prompt": 2, "init_kl_coef": 1}})
                run.current = key
                try:
                    rule(value, run)
                except (TypeError, ValueError):
                    continue
                assert set(run.native) <= known, key
