"""Ranks, groups and the named exchanges, on real gloo processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.distributed.harness import run

from covey.distributed import collectives, mesh


def _place(sizes: dict[str, int]) -> dict[str, object]:
    m = mesh.start(communication="gloo", device=torch.device("cpu"), **sizes)  # type: ignore[arg-type]
    ranks = {
        name: dist.get_process_group_ranks(group) if (group := getattr(m, f"{name}_group")) is not None else [m.rank]
        for name in ("world", "step", "cp", "tp", "fsdp", "pp", "pp_ends")
    }
    place = {"pp": m.pp_rank, "dp": m.dp_rank, "cp": m.cp_rank, "tp": m.tp_rank, "data": m.data_rank}
    mesh.stop()
    return {"ranks": ranks, "place": place, "world": m.world}


def test_ranks_and_groups_of_a_two_by_two_layout() -> None:
    found = run(4, _place, {"dp_shard": 2, "tp": 2})
    assert [f["ranks"]["tp"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [f["ranks"]["step"] for f in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [f["place"]["data"] for f in found] == [0, 0, 1, 1]
    assert [f["place"]["tp"] for f in found] == [0, 1, 0, 1]


def test_weights_are_cut_over_dp_shard_and_cp_but_not_over_replicas() -> None:
    found = run(4, _place, {"dp_replicate": 2, "cp": 2})
    assert [f["ranks"]["fsdp"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [f["ranks"]["cp"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [f["place"]["data"] for f in found] == [0, 1, 2, 3]


def test_stages_are_far_apart_and_pipelines_have_the_same_place_in_every_stage() -> None:
    found = run(6, _place, {"pp": 3, "dp_shard": 2})
    assert [f["place"]["pp"] for f in found] == [0, 0, 1, 1, 2, 2]
    assert [f["place"]["dp"] for f in found] == [0, 1, 0, 1, 0, 1]
    assert [f["place"]["data"] for f in found] == [0, 1, 2, 3, 4, 5]
    assert [f["ranks"]["pp"] for f in found] == [[0, 2, 4], [1, 3, 5]] * 3
    assert [f["ranks"]["pp_ends"] for f in found] == [[0, 4], [1, 5], [2], [3], [0, 4], [1, 5]]
    assert [f["ranks"]["fsdp"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    assert {tuple(f["ranks"]["step"]) for f in found} == {(0, 1, 2, 3, 4, 5)}


def _exchange() -> dict[str, object]:
    m = mesh.start(communication="gloo", device=torch.device("cpu"))
    rank, group = m.rank, m.world_group
    out = {
        "objects": collectives.gather_objects({"rank": rank}, group, what="test"),
        "sum": collectives.sum_dicts({"a": rank + 1.0} | ({"b": 5.0} if rank == 1 else {}), group, what="test"),
        "max": collectives.max_dicts({"a": -rank - 1.0}, group, what="test"),
        "tensor": collectives.sum_tensor(torch.tensor([1.0, rank]), group, what="test").tolist(),
        "any": collectives.any_true(rank == 1, group, what="test"),
        "none": collectives.any_true(False, group, what="test"),
    }
    mesh.stop()
    return out


def test_exchanges_give_every_rank_the_same() -> None:
    expected = {
        "objects": [{"rank": 0}, {"rank": 1}],
        "sum": {"a": 3.0, "b": 5.0},
        "max": {"a": -1.0},
        "tensor": [2.0, 1.0],
        "any": True,
        "none": False,
    }
    assert run(2, _exchange) == [expected, expected]


def test_one_process_needs_no_group() -> None:
    m = mesh.start(communication="gloo", device=torch.device("cpu"))
    assert (m.world, m.num_data, m.is_main) == (1, 1, True)
    assert collectives.gather_objects("x", m.world_group, what="test") == ["x"]
    assert collectives.sum_dicts({"a": 2.0}, m.step_group, what="test") == {"a": 2.0}


@pytest.mark.parametrize(
    ("world", "sizes", "expected"),
    [
        (1, {}, (1, 1, 1, 1, 1)),
        (16, {}, (1, 16, 1, 1, 1)),
        (16, {"tp": 4}, (1, 4, 1, 4, 1)),
        (16, {"dp_replicate": 2, "cp": 2, "tp": 2}, (2, 2, 2, 2, 1)),
        (16, {"pp": 4, "tp": 2}, (1, 2, 1, 2, 4)),
        (8, {"dp_shard": 1, "tp": 8}, (1, 1, 1, 8, 1)),
    ],
)
def test_degrees_multiply_to_the_world(world: int, sizes: dict, expected: tuple[int, ...]) -> None:
    assert mesh.resolve_degrees(world, **sizes) == expected


@pytest.mark.parametrize(
    ("world", "sizes", "words"),
    [
        (6, {"tp": 4}, ["tp 4", "= 4", "6 processes"]),
        (8, {"dp_shard": 3}, ["dp_shard 3", "= 3", "8 processes"]),
        (1, {"tp": 2}, ["tp 2", "1 processes"]),
        (6, {"pp": 4}, ["pp 4", "= 4", "6 processes"]),
    ],
)
def test_impossible_degrees_are_refused_with_the_numbers(world: int, sizes: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        mesh.resolve_degrees(world, **sizes)
    for word in words:
        assert word in str(caught.value)


def _lonely() -> str:
    m = mesh.start(communication="gloo", device=torch.device("cpu"), timeout_s=2.0)
    if m.rank == 1:
        import time

        time.sleep(4.0)
        return "late"
    with pytest.raises(collectives.CollectiveError) as caught:
        collectives.gather_objects(1, m.world_group, what="gather of the rollout")
    return str(caught.value)


def test_a_rank_that_does_not_arrive_is_an_error_that_names_the_exchange() -> None:
    message = run(2, _lonely)[0]
    assert "gather of the rollout" in message
    assert "[0, 1]" in message
