"""The peak of memory is that of a phase, not of the process's whole life."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from covey.device import resolve


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux can reset the peak of a process")
def test_peak_starts_again_after_a_reset():
    device = resolve("cpu")
    device.reset_peak_memory()
    block = np.ones(40_000_000)  # 320 MB
    high = device.peak_memory_bytes()
    del block
    device.reset_peak_memory()
    low = device.peak_memory_bytes()
    assert high - low > 250e6
    again = np.ones(20_000_000)  # 160 MB
    assert device.peak_memory_bytes() - low > 120e6
    del again
