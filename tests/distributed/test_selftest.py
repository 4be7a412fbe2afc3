"""The selftest's exchanges between ranks."""

from __future__ import annotations

import pytest
import torch
from tests.distributed import harness

from covey import device as devices
from covey.tools.selftest import run as selftest


def exchange(fault: float) -> str:
    """The finding of this rank, where every sum is off by `fault`."""
    real = selftest.sum_tensor
    selftest.sum_tensor = lambda tensor, group, *, what: real(tensor, group, what=what) + fault  # type: ignore[assignment]
    (finding,) = selftest.check_exchanges(devices.resolve("cpu"))
    torch.distributed.destroy_process_group()
    return f"{finding.severity}: {finding.found}"


@pytest.mark.slow
def test_two_ranks_agree_on_sums_and_a_wrong_sum_is_named() -> None:
    assert all(found.startswith("ok: 2 ranks agree") for found in harness.run(2, exchange, 0.0))
    wrong = harness.run(2, exchange, 1.0)
    assert all(found.startswith("failure: the sum in torch.float32 is off by 1") for found in wrong)
