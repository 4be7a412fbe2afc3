"""The quickstart's configuration on the simulated NPU: the CPU's numbers, checkpoints across devices, no fall back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed.cases import relative
from tests.distributed.harness import run
from tests.npusim import cases, simulator

pytestmark = [
    pytest.mark.skipif(bool(simulator.why_not()), reason=simulator.why_not()),
    pytest.mark.slow,
]
RATES = ("_tps", "seconds", "gap_m")  # rates of this machine, and differences between two roundings


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    simulator.build()
    return cases.make_quickstart(tmp_path_factory.mktemp("npu"))


@pytest.fixture(scope="module")
def on_cpu(config: Path) -> dict[str, Any]:
    return run(1, cases.train, "cpu", config, config.parent / "cpu", ["train.steps=2"])[0]


@pytest.fixture(scope="module")
def on_npu(config: Path) -> dict[str, Any]:
    return run(1, cases.train, "npu", config, config.parent / "npu", ["train.steps=2"])[0]


def _assert_same_metrics(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs.keys() - {n for n in theirs if any(rate in n for rate in RATES)}:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), name


def _weights(run_directory: Path) -> dict[str, torch.Tensor]:
    return load_file(run_directory / "model" / "model.safetensors")


def _assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """To 1e-5 as a whole; AdamW may move a weight whose gradient is all rounding by a part of its step (3e-4)."""
    assert relative(found, expected) < 1e-5
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-4, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def test_the_quickstart_s_yaml_trains_to_the_cpu_s_numbers(
    config: Path, on_cpu: dict[str, Any], on_npu: dict[str, Any]
) -> None:
    _assert_same_metrics(on_npu["metrics"], on_cpu["metrics"])
    assert max(line.get("actor/grad_norm", 0.0) for line in on_cpu["metrics"]) > 0.1
    _assert_same_weights(_weights(config.parent / "npu"), _weights(config.parent / "cpu"))


def test_the_device_s_kernels_ran_and_are_in_the_record(on_npu: dict[str, Any]) -> None:
    lines = on_npu["facts"]["Device"]
    assert "simulated NPU" in lines["device"]
    assert lines["attention"].startswith("npu_fusion_attention, TND (float32, bfloat16, float16; head size up to 768")
    assert (lines["rms_norm"], lines["rotary"], lines["swiglu"]) == ("npu_rms_norm", "npu_rotary_mul", "npu_swiglu")


def test_nothing_of_a_step_falls_back_to_the_host(on_npu: dict[str, Any]) -> None:
    assert on_npu["fallbacks"] == {}
    assert on_npu["counts"]["aten::mm"] > 100  # it did count


def test_filtered_sampling_does_not_fall_back_either(config: Path) -> None:
    settings = ["train.steps=1", "rollout.top_p=0.9", "rollout.temperature=0.8", "evaluation.every=0"]
    found = run(1, cases.train, "npu", config, config.parent / "filtered", settings)[0]
    assert found["fallbacks"] == {}


@pytest.mark.parametrize(("first", "second"), [("npu", "cpu"), ("cpu", "npu")])
def test_a_checkpoint_of_one_device_is_resumed_on_the_other(
    first: str, second: str, config: Path, on_cpu: dict[str, Any]
) -> None:
    output = config.parent / f"{first}-{second}"
    run(1, cases.train, first, config, output, ["train.steps=1", "evaluation.every=0"])
    found = run(1, cases.train, second, config, output, ["train.steps=2", "evaluation.every=0"], True)[0]
    last = {k: v for k, v in on_cpu["metrics"][-1].items() if not k.startswith("eval")}
    _assert_same_metrics(found["metrics"][-1:], [last])
    _assert_same_weights(_weights(output), _weights(config.parent / "cpu"))


@pytest.mark.parametrize(
    ("sizes", "options"),
    [({}, {}), ({"tp": 2}, {"sequence_parallel": True})],
    ids=["fsdp", "tp"],
)
def test_two_npus_train_as_one_cpu(sizes: dict[str, int], options: dict[str, Any]) -> None:
    simulator.build()
    expected = run(1, cases.two_steps, "cpu", {}, {})[0]
    for found in run(2, cases.two_steps, "npu", sizes, options):
        assert "hccl" in found["backend"]
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        _assert_same_weights(found["weights"], expected["weights"])
