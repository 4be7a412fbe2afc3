"""The simulated device refuses what an NPU refuses, and torch_npu's calls with a mistake do not pass the self-test."""

from __future__ import annotations

from typing import Any

import pytest
from tests.distributed.harness import run
from tests.npusim import cases, simulator

pytestmark = pytest.mark.skipif(bool(simulator.why_not()), reason=simulator.why_not())


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    simulator.build()  # before a test's time limit runs


@pytest.fixture(scope="module")
def refusals() -> dict[str, str]:
    return run(1, cases.refusals)[0]


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        ("operand on the host", "got tensors on npu:0 and on cpu"),
        ("sum with the host", "got tensors on npu:0 and on cpu"),
        ("fp64", "fp64 belongs on the host"),
        ("fp64 by dtype", "fp64, which belongs on the host"),
        ("boolean index", "nonzero"),
        ("assignment by index", "IndexPutV2"),
        ("bfloat16 cumsum", "no bfloat16 kernel"),
        ("int64 sort", "AI CPU"),
        ("unsorted topk", "sorted=False"),
    ],
)
def test_the_device_refuses(mistake: str, error: str, refusals: dict[str, str]) -> None:
    assert error in refusals[mistake]


@pytest.fixture(scope="module")
def collectives() -> list[dict[str, Any]]:
    return run(2, cases.collectives)


def test_hccl_sums_averages_and_gathers_as_gloo_on_host_copies(collectives: list[dict[str, Any]]) -> None:
    for found in collectives:
        assert found["sum"] == [3.0, 6.0]
        assert found["average"] == [1.5, 3.0]
        assert found["maximum"] == [2, 4]
        assert found["gathered fp64"] == [0.0, 0.0, 1.0, 1.0]  # moving bytes has no number type
        assert found["host tensor over gloo"] == [3.0]


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        ("average of int", "AVG of Long"),
        ("fp64", "Unsupported data type Double"),
        ("bits", "no bitwise reduction"),
        ("not contiguous", "must be contiguous"),
    ],
)
def test_hccl_refuses(mistake: str, error: str, collectives: list[dict[str, Any]]) -> None:
    assert all(error in found[mistake] for found in collectives)


@pytest.fixture(scope="module")
def kernel_mistakes() -> dict[str, str]:
    return run(1, cases.kernel_mistakes)[0]


def test_the_calls_of_torch_npu_pass_the_self_test(kernel_mistakes: dict[str, str]) -> None:
    assert kernel_mistakes["none"] == ""


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        ("missing scale", "differs from its reference in the output"),
        ("top-left mask", "differs from its reference in the output"),
        ("no mask", "differs from its reference in the output"),
        ("statistics by head", "differs from its reference"),
        ("missing scale in backward", "differs from its reference in the gradient"),
        ("wrong keyword", "unexpected keyword argument 'cu_seqlens_q'"),
        ("wrong keyword in backward", "unexpected keyword argument 'scale'"),
        ("default epsilon", "differs from its reference in the output"),
    ],
)
def test_a_mistake_in_a_call_of_torch_npu_ends_the_start(
    mistake: str, error: str, kernel_mistakes: dict[str, str]
) -> None:
    assert error in kernel_mistakes[mistake]


def test_more_sequences_than_one_call_takes_are_split() -> None:
    found = run(1, cases.many_sequences)[0]
    assert found["calls"] == [1024, 476]
    assert found["difference"] < 1e-5
