"""Room on disk and in memory, against sizes worked out by hand."""

from __future__ import annotations

import shutil
from collections import namedtuple
from dataclasses import replace

import pytest

from covey.checks import resources
from covey.checks.resources import check_disk, check_memory, disk_bytes
from covey.device import Device

Usage = namedtuple("Usage", "total used free")


def test_a_sound_run_has_room(make):
    material = make()
    assert check_disk(material).severity == check_memory(material).severity == "ok"


def test_sizes_are_those_of_the_files(make):
    material = make(checkpoint={"every": 1, "keep_last": 2}, train={"steps": 4})
    parameters = 263 * 128 + 2 * (128 * 128 * 2 + 128 * 64 * 2 + 128 + 64 * 2 + 3 * 128 * 512 + 2 * 128) + 128
    needed = disk_bytes(material)
    assert needed["one checkpoint"] == 12 * parameters  # an fp32 number and two moments
    assert needed["checkpoints"] == 3 * 12 * parameters  # two are kept while a third is written
    assert needed["model"] == 4 * parameters
    assert needed["records"] == 4 * 6 * 4 * (4000 + 28 * 40)
    assert disk_bytes(make(logging={"records": False}))["records"] == 0
    adapted = disk_bytes(make(lora={"rank": 4}))
    assert adapted["one checkpoint"] < needed["one checkpoint"] / 10 and adapted["model"] == needed["model"]


@pytest.mark.parametrize(("free", "severity"), [(10_000, "failure"), (10_000_000, "warning"), (10**10, "ok")])
def test_a_small_disk_is_found(make, monkeypatch, free, severity):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**12, 10**12 - free, free))
    found = check_disk(make(checkpoint={"every": 1, "keep_last": 3}))
    assert found.severity == severity and found.evidence["free"] == free


@pytest.mark.parametrize(
    ("gib", "severity"),
    [(0.001, "failure"), (0.015, "warning"), (1, "ok")],  # 10 MiB of weights and moments; logits and cache on top
)
def test_a_small_device_is_found(make, monkeypatch, gib, severity):
    amount = int(gib * 2**30)
    monkeypatch.setattr(Device, "memory_bytes", lambda self: (amount, amount))
    found = check_memory(make(rollout={"kv_cache_bytes": 2**24}))
    assert found.severity == severity, found.found


def test_a_run_that_has_loaded_its_weights_is_measured_by_the_whole_device(make, monkeypatch):
    monkeypatch.setattr(Device, "memory_bytes", lambda self: (0, 2**30))
    material = make()
    assert check_memory(material).severity == "failure"
    assert check_memory(replace(material, network=material.model)).severity == "ok"


def test_processes_of_a_host_share_its_memory(make, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    found = check_memory(make())
    assert found.evidence["peak"] == 3 * resources.peak_bytes(
        {name: size for name, size in found.evidence.items() if name not in ("peak", "sure", "free", "total")}
    )
