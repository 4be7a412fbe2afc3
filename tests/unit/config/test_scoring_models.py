"""Settings of reference and teacher: what has no effect, or cannot work, is an error that names the keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from covey.config.load import load_config

BASE = "model: {path: m}\ndata: {train: d.jsonl}\noutput_dir: o\n"
REWARD = "reward: {functions: [math]}\n"
TEACHER = "distillation: {teacher: t}\n"


def load(tmp_path: Path, text: str) -> object:
    (tmp_path / "run.yaml").write_text(BASE + text)
    return load_config(tmp_path / "run.yaml", []).config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (REWARD + "reference: {sync_every: 4}", "reference.sync_every=4 has no effect with algorithm.kl_coef=0"),
        (REWARD + "reference: {offload: true}", "reference.offload=True has no effect with algorithm.kl_coef=0"),
        (REWARD + "algorithm: {kl_coef: 0.1}\nreference: {decay: 0.9}", r"decay=0.9 has no effect with sync_every=0"),
        (REWARD + "algorithm: {kl_coef: 0.1}\nreference: {sync_every: 1, decay: 1.0}", "reference.decay"),
        ("", "no reward function"),
        (TEACHER + "evaluation: {every: 5}", "evaluation.every without a reward function"),
        (TEACHER + "algorithm: {max_rounds: 3, overlong_buffer: 4}", "algorithm.max_rounds, algorithm.overlong_buffer"),
        (TEACHER + "algorithm: {loss: gspo}", "distillation with algorithm.loss=gspo"),
        (REWARD + TEACHER + "algorithm: {sequence_ratio: true}", "algorithm.sequence_ratio=True"),
        (TEACHER + "algorithm: {off_policy_max_kl: 0.1}", "algorithm.off_policy_max_kl=0.1"),
        (TEACHER + "algorithm: {sampling_consistent: true}", "algorithm.sampling_consistent=True"),
        ("distillation: {coef: 2}", "distillation.teacher"),
        ("distillation: {teacher: t, coef: 0}", "distillation.coef"),
        (REWARD + "algorithm: {entropy_target: 1.0, entropy_coef: 2}", "entropy_coef=2"),
        (REWARD + "algorithm: {entropy_target: 1.0, entropy_coef: -0.1}", "entropy_coef=-0.1"),
    ],
)
def test_settings_that_cannot_work_are_errors(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        TEACHER,
        TEACHER + "rollout: {num_samples: 1}",  # no group baseline where there are no rewards
        REWARD + TEACHER + "evaluation: {every: 5}",
        REWARD + "algorithm: {kl_coef: 0.1}\nreference: {sync_every: 1, decay: 0.99, offload: true}",
        "reward: {functions: [{name: math, weight: 0}]}\nevaluation: {every: 5}\n" + TEACHER,
    ],
)
def test_settings_that_work_are_read(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, text)


def test_a_curriculum_by_pass_rate_needs_rewards(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(BASE + TEACHER)
    with pytest.raises(ValueError, match="data.curriculum without a reward function"):
        load_config(tmp_path / "run.yaml", ["data.curriculum.by=pass_rate"])
    assert load_config(tmp_path / "run.yaml", ["data.curriculum.by=difficulty"])


def test_one_response_a_prompt_needs_another_baseline_when_there_are_rewards(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a group baseline needs at least 2 responses"):
        load(tmp_path, REWARD + TEACHER + "rollout: {num_samples: 1}")
