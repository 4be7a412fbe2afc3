"""The order of a pipeline: complete, free of deadlocks, and as short as the formula says."""

from __future__ import annotations

import pytest

from covey.distributed.pipeline_order import Action, describe_stages, forward_orders, layers_of_chunks, orders

LAYOUTS = [(ranks, chunks, micros) for ranks in (2, 3, 4, 8) for chunks in (1, 2, 3, 4) for micros in range(1, 20)]


def _play(order: list[list[Action]], num_chunks: int) -> int:
    """Ticks that the ranks need when each pass takes one and waits for what it takes; AssertionError on a deadlock."""
    place, done, ticks = [0] * len(order), set(), 0
    while any(place[rank] < len(actions) for rank, actions in enumerate(order)):
        ran = []
        for rank, actions in enumerate(order):
            if place[rank] == len(actions):
                continue
            kind, chunk, micro = (action := actions[place[rank]]).kind, action.chunk, action.micro
            if kind == "forward":
                possible = chunk == 0 or ("forward", chunk - 1, micro) in done
            else:
                possible = ("forward", chunk, micro) in done
                possible &= chunk == num_chunks - 1 or ("backward", chunk + 1, micro) in done
            if possible:
                ran.append((rank, (kind, chunk, micro)))
        assert ran, "a deadlock"
        for rank, action in ran:
            place[rank] += 1
            done.add(action)
        ticks += 1
    return ticks


@pytest.mark.parametrize(("ranks", "chunks", "micros"), LAYOUTS)
def test_every_pass_runs_once_on_its_rank_and_nobody_waits_for_ever(ranks: int, chunks: int, micros: int) -> None:
    order = orders(micros, ranks, chunks)
    for rank, actions in enumerate(order):
        expected = {
            (kind, chunk, micro)
            for kind in ("forward", "backward")
            for chunk in range(rank, ranks * chunks, ranks)
            for micro in range(micros)
        }
        assert len(actions) == len(expected)
        assert {(a.kind, a.chunk, a.micro) for a in actions} == expected
    ticks = _play(order, ranks * chunks)
    if micros >= ranks:  # arXiv:2104.04473 sec. 2.2: the work, and ranks - 1 passes forward and back
        assert ticks == 2 * (micros * chunks + ranks - 1)


@pytest.mark.parametrize(("ranks", "chunks", "micros"), LAYOUTS[::7])
def test_forwards_alone_run_through_as_well(ranks: int, chunks: int, micros: int) -> None:
    order = forward_orders(micros, ranks, chunks)
    assert sum(map(len, order)) == ranks * chunks * micros
    assert _play(order, ranks * chunks) >= micros * chunks + ranks - 1


def test_one_chunk_a_rank_is_one_forward_one_backward() -> None:
    def text(actions: list[Action]) -> str:
        return " ".join(f"{a.kind[0]}{a.micro}" for a in actions)

    assert [text(actions) for actions in orders(4, 3, 1)] == [
        "f0 f1 f2 b0 f3 b1 b2 b3",
        "f0 f1 b0 f2 b1 f3 b2 b3",
        "f0 b0 f1 b1 f2 b2 f3 b3",
    ]


def test_a_rank_keeps_no_more_micro_batches_than_ranks_follow_it() -> None:
    for rank, actions in enumerate(orders(50, 4, 1)):
        kept = most = 0
        for action in actions:
            kept += 1 if action.kind == "forward" else -1
            most = max(most, kept)
        assert most == 4 - rank


def test_gradients_of_a_chunk_add_up_in_the_order_of_the_micro_batches() -> None:
    for actions in orders(11, 4, 3):
        for chunk in {a.chunk for a in actions}:
            assert [a.micro for a in actions if a.kind == "backward" and a.chunk == chunk] == list(range(11))


def test_neighbours_name_each_other() -> None:
    assert Action("forward", 1, 5).feeds(4) == Action("forward", 2, 5)
    assert Action("backward", 1, 5).takes(4) == Action("backward", 2, 5)
    assert Action("forward", 3, 5).feeds(4) is None
    assert Action("backward", 3, 5).takes(4) is None
    assert Action("forward", 0, 5).takes(4) is None
    assert Action("backward", 0, 5).feeds(4) is None


def test_layers_are_spread_evenly_or_as_given() -> None:
    assert layers_of_chunks(7, 2, 2, None) == [range(2), range(2, 4), range(4, 6), range(6, 7)]
    assert layers_of_chunks(7, 2, 1, [5, 2]) == [range(5), range(5, 7)]


@pytest.mark.parametrize(
    ("num_layers", "ranks", "chunks", "given", "words"),
    [
        (3, 2, 2, None, ["pp=2", "pp_chunks=2", "3 layers"]),
        (7, 2, 1, [5, 1], ["[5, 1]", "6 layers", "7 layers"]),
        (7, 2, 2, [5, 2], ["2 pieces", "4 pieces"]),
    ],
)
def test_impossible_layers_are_refused_with_the_numbers(
    num_layers: int, ranks: int, chunks: int, given: list[int] | None, words: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        layers_of_chunks(num_layers, ranks, chunks, given)
    for word in words:
        assert word in str(caught.value)


def test_the_table_names_every_stages_layers() -> None:
    assert describe_stages(layers_of_chunks(7, 2, 2, None), 2) == {
        "stage 0": "embedding, layers 0-1, layers 4-5",
        "stage 1": "layers 2-3, layer 6, norm and head",
    }
