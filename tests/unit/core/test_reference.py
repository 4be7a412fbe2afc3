"""Models that only score, and a reference that follows: in whole runs in tests/invariants/test_run_state.py; here the
parts of them that a small fp32 run on a cpu does not reach."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from covey import device as devices
from covey.config.schema import Config, TrainConfig
from covey.optim import Optimizer
from covey.policy import Policy
from covey.reference import Follower, ScoringModel, check_teacher_tokens
from covey.setup import Parts, load_parts
from covey.tools import tiny
from covey.types import Group, Prompt, Response


class _Model:
    """What a Follower asks of a policy: its model's parameters."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.model = nn.Linear(1, len(weight), bias=False, dtype=weight.dtype)
        with torch.no_grad():
            self.model.weight[:, 0] = weight
        self.policy = self


def _follower(reference: _Model, policy: _Model, *, sync_every: int, decay: float) -> tuple[Follower, Optimizer]:
    optimizer = Optimizer(policy.model.parameters(), TrainConfig())
    follower = Follower(
        cast(ScoringModel, reference), cast(Policy, policy), optimizer, sync_every=sync_every, decay=decay
    )
    return follower, optimizer


def test_a_16_bit_reference_is_averaged_in_fp32() -> None:
    """100 moves of 0.001 x 0.1: each is below the spacing of bfloat16 at 1 (0.0078), their sum is not."""
    reference, policy = _Model(torch.ones(4, dtype=torch.bfloat16)), _Model(torch.full((4,), 1.1, dtype=torch.bfloat16))
    follower, optimizer = _follower(reference, policy, sync_every=1, decay=0.999)
    target = optimizer.masters[0][0, 0].item()
    for _ in range(100):
        follower.after_step()
    expected = target + (1.0 - target) * 0.999**100
    torch.testing.assert_close(follower.pieces()["weight"], torch.full((4, 1), expected), rtol=1e-6, atol=0)
    assert reference.model.weight[0, 0].item() == torch.tensor(expected).bfloat16().item() > 1.0


def test_a_16_bit_reference_becomes_what_the_policy_runs_on() -> None:
    reference, policy = _Model(torch.ones(4, dtype=torch.bfloat16)), _Model(torch.zeros(4, dtype=torch.bfloat16))
    follower, optimizer = _follower(reference, policy, sync_every=2, decay=0.0)
    optimizer.masters[0].fill_(0.123456)  # between two bfloat16 numbers
    optimizer.publish()
    follower.after_step()
    assert reference.model.weight[0, 0].item() == 1.0
    follower.after_step()
    assert torch.equal(reference.model.weight, policy.model.weight)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    tiny.make_model(tmp_path / "model", seed=0)
    return Config.model_validate(
        {
            "model": {"path": str(tmp_path / "model")},
            "data": {"train": "x"},
            "distillation": {"teacher": str(tmp_path / "teacher")},
            "output_dir": "x",
        }
    )


@pytest.fixture
def parts(config: Config) -> Parts:
    return load_parts(config.model, config.train, kind="cpu", temperature=1.0)


def test_offload_does_nothing_on_cpu_and_says_so(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "covey.reference"):
        model = ScoringModel(parts.policy, parts, key="distillation.teacher", offload=True)
    assert "distillation.teacher: offload does nothing on cpu" in caplog.text
    assert model.logprobs([_group([5, 6])]).shape == (2,)


def test_weights_are_on_the_device_while_they_are_used_and_in_host_memory_otherwise(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator is not at hand: the device is called one, and where the weights are sent is written down."""
    moves: list[str] = []
    monkeypatch.setattr(parts.policy.parallel, "move", lambda device: moves.append(str(device)))
    monkeypatch.setattr(devices.Device, "release_memory", lambda self: moves.append("released"))
    parts.device = replace(parts.device, kind="npu", torch_device=torch.device("cpu", 0))
    model = ScoringModel(parts.policy, parts, key="model.path", offload=True)
    assert moves == ["cpu", "released"]
    scores = parts.policy.logprobs
    monkeypatch.setattr(parts.policy, "logprobs", lambda groups: moves.append("scored") or scores(groups))
    model.logprobs([_group([5])])
    assert moves[2:] == ["cpu:0", "scored", "cpu", "released"]


def test_a_token_that_the_model_has_no_number_for_is_named(parts: Parts) -> None:
    model = ScoringModel(parts.policy, parts, key="distillation.teacher", offload=False)
    size = parts.policy.model.config.vocab_size
    with pytest.raises(ValueError, match=rf"distillation.teacher: the policy sampled token {size}"):
        model.logprobs([_group([5, size])])


def test_a_teacher_with_other_tokens_is_refused(parts: Parts, config: Config, tmp_path: Path) -> None:
    tiny.make_model(tmp_path / "teacher", seed=1)
    check_teacher_tokens(config, parts.tokenizer)
    other = tiny.make_tokenizer()
    other.add_tokens(["<extra>"])
    other.save_pretrained(tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"distillation.teacher=.*1 tokens differ, for example '<extra>': id None"):
        check_teacher_tokens(config, parts.tokenizer)


def test_a_teacher_that_is_not_there_is_named_by_its_key(parts: Parts, config: Config) -> None:
    with pytest.raises(ValueError, match="distillation.teacher="):
        check_teacher_tokens(config, parts.tokenizer)


def _group(token_ids: list[int]) -> Group:
    return Group(Prompt(0, [3, 4], ""), [Response(token_ids, [0.0] * len(token_ids))])
