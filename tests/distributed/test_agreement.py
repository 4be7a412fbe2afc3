"""Debug mode between ranks: what they do not agree on is said by both, and nothing hangs."""

from __future__ import annotations

import time

import pytest
import torch
from tests.distributed import cases
from tests.distributed.harness import run

from covey.distributed import mesh as meshes
from covey.distributed.collectives import CollectiveError, gather_objects, sum_dicts, sum_tensor

pytestmark = pytest.mark.slow  # processes


def _exchange(timeout_s: float, fault: str, debug: bool = True) -> tuple[str, float]:
    """(what the fault was reported as, a sum from before it) of this rank; rank 1 is the faulty one."""
    mesh = meshes.start(communication="gloo", device=cases.CPU, timeout_s=timeout_s, debug=debug)
    faulty, group, text = mesh.rank == 1, mesh.world_group, ""
    before = float(sum_tensor(torch.full((2,), 1.0 + mesh.rank), group, what="numbers that are fine")[0])
    before += sum_dicts({"a": 1.0}, group, what="words that are fine")["a"]
    try:
        if fault == "shape":
            sum_tensor(torch.ones(3 if faulty else 2), group, what="gradient norm")
        elif fault == "operation" and faulty:
            gather_objects(None, group, what="whether to stop")
        elif fault == "absent" and faulty:
            time.sleep(3 * timeout_s)
        else:
            sum_tensor(torch.ones(2), group, what="gradient norm")
    except CollectiveError as error:
        text = str(error)
    time.sleep(0.5)  # rank 0 keeps the store that the other still reads
    return text, before


def test_another_shape_is_named_by_both_ranks() -> None:
    for text, before in run(2, _exchange, 20.0, "shape"):
        assert before == 5.0
        assert text == (
            "ranks [0, 1] do not mean the same in exchange 3 of their group: "
            "rank 0: sum of float32 [2] in 'gradient norm'; rank 1: sum of float32 [3] in 'gradient norm'"
        )


def test_another_operation_is_named_by_both_ranks() -> None:
    for text, _ in run(2, _exchange, 20.0, "operation"):
        assert "rank 0: sum of float32 [2] in 'gradient norm'" in text
        assert "rank 1: gathering of objects in 'whether to stop'" in text


def test_a_rank_that_does_not_come_is_named_with_where_it_was_last() -> None:
    (text, _), _ = run(2, _exchange, 2.0, "absent")
    assert text == (
        "rank 0 is at sum of float32 [2] in 'gradient norm', exchange 3 of ranks [0, 1], but ranks [1] did not come "
        "within parallel.timeout_s=2: rank 1 was last at gathering of objects in 'words that are fine' (number 2 of "
        "ranks [0, 1])"
    )


def test_without_a_fault_nothing_changes() -> None:
    for debug in (False, True):
        assert run(2, _exchange, 20.0, "none", debug) == [("", 5.0), ("", 5.0)]


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}, {"dp_shard": 2}], ids=str)
def test_a_whole_update_agrees_and_keeps_its_bits(sizes: dict[str, int]) -> None:
    options = {"sequence_parallel": True} if "tp" in sizes else {}
    plain, checked = (
        run(2, cases.gradient, "qwen2", sizes | {"debug": debug}, {}, options)[0] for debug in (False, True)
    )
    assert torch.equal(plain["logprobs"], checked["logprobs"])
    assert plain["stats"] == checked["stats"]
    assert all(torch.equal(checked["gradients"][name], g) for name, g in plain["gradients"].items())
