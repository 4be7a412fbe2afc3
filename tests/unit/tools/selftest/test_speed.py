"""Speeds are given as shares of what was measured in the same minute."""

from __future__ import annotations

import pytest

from covey import device as devices
from covey.tools.selftest import speed

CPU = devices.resolve("cpu")


def test_the_speeds_are_shares_of_measured_rooflines() -> None:
    findings = {f.rule: f for f in speed.check_speed(CPU)}
    peak = findings["roofline"].evidence["flops_per_s"]
    flops = findings["attention speed"].evidence
    assert flops["share"] == pytest.approx(flops["flops_per_s"] / peak)
    assert peak > 1e8  # a hundred million a second: below that something was not measured
