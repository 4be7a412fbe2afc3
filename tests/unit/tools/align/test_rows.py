"""The same token gets the same canonical row from a packed micro-batch and from a padded batch."""

from __future__ import annotations

import torch

from covey.models.packing import pack
from covey.tools.align.rows import Layout
from covey.types import Group, Prompt, Response

GROUPS = [
    Group(Prompt(0, [10, 11, 12], ""), [Response([20, 21, 22], [0.0] * 3), Response([30], [0.0])]),
    Group(Prompt(1, [40], ""), [Response([50, 51], [0.0] * 2), Response([60, 61, 62, 63], [0.0] * 4)]),
]
# Worked by hand: prompt, then every response without its last token.
TOKENS = [10, 11, 12, 20, 21, 40, 50, 60, 61, 62]
POSITIONS = [0, 1, 2, 3, 4, 0, 1, 1, 2, 3]
TARGETS = [2, 3, 4, 2, 5, 6, 5, 7, 8, 9]  # the row that predicts each response token


def test_canonical_rows_by_hand() -> None:
    layout = Layout(GROUPS)
    assert layout.position == POSITIONS and layout.targets.tolist() == TARGETS
    assert layout.sample == [-1, -1, -1, 0, 0, -1, 0, 1, 1, 1]
    assert layout.num_witness == 5  # the first group's prompt and first response


def test_every_batching_maps_to_the_same_tokens() -> None:
    layout = Layout(GROUPS)
    for max_tokens in (4, 6, 100):
        found: dict[int, int] = {}
        for batch in pack(GROUPS, max_tokens=max_tokens, device=torch.device("cpu")):
            place = layout.of_packed(batch)
            ids = batch.input_ids[place.source].tolist()
            for row, token in zip(place.canonical.tolist(), ids, strict=True):
                assert found.setdefault(row, token) == token
        assert found == dict(enumerate(TOKENS))
    sequences = [[*g.prompt.input_ids, *r.token_ids[:-1]] for g in GROUPS for r in g.responses]
    width = max(map(len, sequences))
    padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in sequences]).flatten()
    place = layout.of_sequences(range(4), [len(ids) for ids in sequences], width)
    assert dict(zip(place.canonical.tolist(), padded[place.source].tolist(), strict=True)) == dict(enumerate(TOKENS))


def test_a_choice_keeps_a_prefix_and_spreads_the_rest() -> None:
    layout = Layout([Group(Prompt(0, list(range(50)), ""), [Response(list(range(60)), [0.0] * 60)] * 3)])
    rows = layout.choose(40).tolist()
    assert (
        len(rows) <= 40 and rows == sorted(set(rows)) and rows[:20] == list(range(20)) and rows[-1] == len(layout) - 1
    )
    assert layout.choose(10**6).tolist() == list(range(len(layout)))
