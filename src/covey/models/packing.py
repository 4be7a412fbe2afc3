"""Groups to packed rows of tokens: each prompt once, then its responses, no padding.

Layout (a worked example stands in `PackedBatch`): `input_ids = prompt ++ r1[:-1] ++ r2[:-1] ++ ...`; positions restart
at the prompt's length for every response; the first token of every response is predicted by the prompt's last row. A
group larger than the token budget is split into several rows that repeat the prompt, which changes memory and speed
but not the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from covey.models.balance import row_cost, spread
from covey.types import Group, PackedBatch, Segment


@dataclass
class _Row:
    """A prompt with some of its group's responses: the unit that is never split over micro-batches."""

    group: int
    samples: list[int]
    num_tokens: int


def pack(
    groups: Sequence[Group],
    *,
    max_tokens: int,
    device: torch.device,
    share_prompts: bool = True,
    only: Sequence[int] | None = None,
    rank: int = 0,
    world: int = 1,
    context_cost: float = 0.0,
) -> list[PackedBatch]:
    """Micro-batches of at most `max_tokens` packed tokens that together hold every response once.

    A response whose prompt and tokens alone exceed the budget still gets a micro-batch of its own. Responses without
    tokens are left out. `only`: the groups to pack (a mini-batch); token_index always counts over all groups.
    share_prompts=False repeats the prompt for every response: the plain layout, for comparisons.

    world > 1: only the micro-batches of `rank`. All ranks get equally many and about the same work (context_cost as in
    balance.row_cost); one for which nothing is left runs a prompt without responses.
    """
    chosen = range(len(groups)) if only is None else only
    rows = [row for p in chosen for row in _rows(p, groups[p], max_tokens if share_prompts else 0)]
    offsets = _token_offsets(groups)
    if world == 1:
        return [_build(groups, rows_of_bin, offsets, device) for rows_of_bin in _fill_bins(rows, max_tokens)]
    filler = _Row(shortest := min(chosen, key=lambda p: len(groups[p].prompt.input_ids)), [], 0)
    filler.num_tokens = len(groups[shortest].prompt.input_ids)
    bins = _bins_of_rank(groups, rows, max_tokens, rank, world, context_cost)
    return [_build(groups, rows_of_bin or [filler], offsets, device) for rows_of_bin in bins]


def pad_batch(batch: PackedBatch, multiple: int) -> PackedBatch:
    """The batch with rows added to a multiple: a prompt of token 0 without responses, which nothing else sees."""
    missing = -batch.num_tokens % multiple
    if not missing:
        return batch
    zeros = batch.input_ids.new_zeros(missing)
    return replace(
        batch,
        input_ids=torch.cat([batch.input_ids, zeros]),
        position_ids=torch.cat([batch.position_ids, torch.arange(missing, device=zeros.device)]),
        segments=[*batch.segments, Segment(batch.num_tokens, batch.num_tokens + missing, None)],
        num_tokens=batch.num_tokens + missing,
    )


def response_lengths(groups: Sequence[Group]) -> list[int]:
    """Tokens of every response, in canonical order."""
    return [len(response.token_ids) for group in groups for response in group.responses]


def _token_offsets(groups: Sequence[Group]) -> list[list[int]]:
    """Where each response's tokens start in the step's canonical order."""
    offsets, position = [], 0
    for group in groups:
        offsets.append([])
        for response in group.responses:
            offsets[-1].append(position)
            position += len(response.token_ids)
    return offsets


def _rows(index: int, group: Group, max_tokens: int) -> list[_Row]:
    """The group's responses over as few rows as the budget allows."""
    num_prompt = len(group.prompt.input_ids)
    rows: list[_Row] = []
    for sample, response in enumerate(group.responses):
        if not response.token_ids:
            continue
        length = len(response.token_ids) - 1
        if not rows or rows[-1].num_tokens + length > max_tokens:
            rows.append(_Row(index, [], num_prompt))
        rows[-1].samples.append(sample)
        rows[-1].num_tokens += length
    return rows


def _fill_bins(rows: list[_Row], max_tokens: int) -> list[list[_Row]]:
    """First-fit decreasing: few, full micro-batches. Ties keep the rows' order, so that the result is deterministic."""
    bins: list[list[_Row]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda r: -r.num_tokens):
        for i, free in enumerate(room):
            if row.num_tokens <= free:
                bins[i].append(row)
                room[i] -= row.num_tokens
                break
        else:
            bins.append([row])
            room.append(max_tokens - row.num_tokens)
    return [sorted(b, key=lambda r: (r.group, r.samples[0])) for b in bins]


def _bins_of_rank(
    groups: Sequence[Group], rows: list[_Row], max_tokens: int, rank: int, world: int, context_cost: float
) -> list[list[_Row]]:
    rows = list(rows)
    while len(rows) < world and (largest := max(rows, key=lambda r: len(r.samples))).samples[1:]:
        rows.remove(largest)  # fewer rows than ranks: halve one, repeating its prompt
        half = len(largest.samples) // 2
        rows += [_row_of(groups, largest.group, part) for part in (largest.samples[:half], largest.samples[half:])]
    costs = []
    for row in rows:
        group = groups[row.group]
        lengths = [len(group.responses[sample].token_ids) - 1 for sample in row.samples]
        costs.append(row_cost(row.num_tokens, len(group.prompt.input_ids), lengths, context_cost=context_cost))
    bins = spread(costs, [row.num_tokens for row in rows], max_tokens=max_tokens, world=world)[rank]
    return [[rows[i] for i in rows_of_bin] for rows_of_bin in bins]


def _row_of(groups: Sequence[Group], index: int, samples: list[int]) -> _Row:
    group = groups[index]
    num_responses = sum(len(group.responses[sample].token_ids) - 1 for sample in samples)
    return _Row(index, samples, len(group.prompt.input_ids) + num_responses)


def _build(groups: Sequence[Group], rows: list[_Row], offsets: list[list[int]], device: torch.device) -> PackedBatch:
    input_ids: list[int] = []
    position_ids: list[int] = []
    segments: list[Segment] = []
    target_rows: list[int] = []
    target_ids: list[int] = []
    token_index: list[int] = []
    response_index: list[int] = []
    response_ids: list[int] = []
    num_kept: list[int] = []
    samples_before = [0]
    for group in groups:
        samples_before.append(samples_before[-1] + len(group.responses))
    for row in rows:
        group = groups[row.group]
        prompt_ids = group.prompt.input_ids
        num_prompt = len(prompt_ids)
        prompt_segment = len(segments)
        segments.append(Segment(len(input_ids), len(input_ids) + num_prompt, None))
        input_ids += prompt_ids
        position_ids += range(num_prompt)
        last_prompt_row = len(input_ids) - 1
        for sample in row.samples:
            ids = group.responses[sample].token_ids
            start, length = len(input_ids), len(ids) - 1
            if length:
                segments.append(Segment(start, start + length, prompt_segment))
            input_ids += ids[:-1]
            position_ids += range(num_prompt, num_prompt + length)
            target_rows += [last_prompt_row, *range(start, start + length)]
            target_ids += ids
            first = offsets[row.group][sample]
            token_index += range(first, first + len(ids))
            response_index += [len(response_ids)] * len(ids)
            response_ids.append(samples_before[row.group] + sample)
            num_kept += group.responses[sample].num_kept or []

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

    return PackedBatch(
        input_ids=tensor(input_ids),
        position_ids=tensor(position_ids),
        segments=segments,
        target_rows=tensor(target_rows),
        target_ids=tensor(target_ids),
        token_index=tensor(token_index),
        response_index=tensor(response_index),
        response_ids=response_ids,
        num_tokens=len(input_ids),
        num_kept=tensor(num_kept) if num_kept and len(num_kept) == len(target_ids) else None,
    )
