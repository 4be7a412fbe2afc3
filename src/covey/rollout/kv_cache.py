"""Keys and values of running responses, and the two attention plans that fill and read them.

A *wave* is a set of prompts admitted together with the rows (responses) that continue them. All rows of a wave are
equally long, so the response part of attention needs no mask; prompts are padded to the wave's longest one and kept
once, however many responses share them. Decode attention is one softmax over [prompt scores | response scores], where
the prompt scores of a prompt's responses are one matrix product.

Rows leave a wave by moving the last rows into their places, so the model never runs a finished response and only the
moved rows are copied. Prompts and memory are given back when enough of them is unused.

Shapes: S rows, Q prompts in a wave, M the most rows that share one of its prompts, P its longest prompt, N heads, N_kv
key/value heads, g = N / N_kv, H head dim, L response tokens so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

_FIRST_CAPACITY = 32  # response tokens a new cache has room for; doubles when full


@dataclass(frozen=True)
class CacheLayout:
    """What one token needs."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def empty(self, rows: int, length: int) -> list[Tensor]:
        """One tensor (rows, N_kv, length, H) a layer, filled with zeros."""
        shape = (rows, self.num_kv_heads, length, self.head_dim)
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(self.num_layers)]


class Wave:
    """The caches of one wave. `prompt_of_row` names, for every row, the prompt it continues."""

    def __init__(self, layout: CacheLayout, prompt_lens: list[int], prompt_of_row: list[int], max_length: int) -> None:
        self.layout = layout
        self.prompt_lens = prompt_lens
        self.prompt_of_row = prompt_of_row
        self.max_length = max_length  # response tokens a row can reach
        self.length = 0  # response tokens in the cache, L
        self.prompt_keys = layout.empty(len(prompt_lens), max(prompt_lens))
        self.prompt_values = layout.empty(len(prompt_lens), max(prompt_lens))
        self._capacity_rows = len(prompt_of_row)
        capacity = min(_FIRST_CAPACITY, max_length)
        self.keys = layout.empty(self._capacity_rows, capacity)
        self.values = layout.empty(self._capacity_rows, capacity)
        self._index_rows()

    @property
    def num_rows(self) -> int:
        """Live responses, S."""
        return len(self.prompt_of_row)

    @property
    def reserved_bytes(self) -> int:
        """Memory the wave can grow to: padded prompts, and every row it has room for at full length."""
        tokens = len(self.prompt_lens) * self.prompt_keys[0].shape[2] + self._capacity_rows * self.max_length
        return tokens * self.layout.token_bytes

    def keep_rows(self, order: list[int]) -> None:
        """Row i becomes what row order[i] was; the rows not named are gone."""
        moves = [(i, row) for i, row in enumerate(order) if i != row]
        if moves:
            target, source = torch.tensor(moves, device=self.layout.device).t()
            for cache in (*self.keys, *self.values):
                cache[target, :, : self.length] = cache[source, :, : self.length]
        self.prompt_of_row = [self.prompt_of_row[row] for row in order]
        if 2 * len(order) <= self._capacity_rows:
            self._resize(len(order), self.keys[0].shape[2])
        used = sorted(set(self.prompt_of_row))
        if 4 * len(used) <= 3 * len(self.prompt_lens):
            self._keep_prompts(used)
        self._index_rows()

    def start_token(self) -> None:
        """Make room for one more token in every row."""
        if self.length == self.keys[0].shape[2]:
            self._resize(self._capacity_rows, min(2 * self.length, self.max_length))
        self.length += 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """(S, N, H): the newest token of every row attends to its prompt and to its response so far."""
        rows, heads, length = self.num_rows, key.shape[0], self.length
        prompt_keys, prompt_values = self.prompt_keys[layer], self.prompt_values[layer]
        prompts, _, longest, dim = prompt_keys.shape
        keys, values = self.keys[layer][:rows], self.values[layer][:rows]
        keys[:, :, length - 1] = key.transpose(0, 1)
        values[:, :, length - 1] = value.transpose(0, 1)
        keys = keys.view(rows * heads, -1, dim)[:, :length]
        values = values.view(rows * heads, -1, dim)[:, :length]
        shared = query.shape[0] // heads  # g

        query = (query * scale).transpose(0, 1).reshape(rows, heads, shared, dim)
        response_scores = torch.bmm(query.view(rows * heads, shared, dim), keys.transpose(1, 2))
        slots = self._to_slots(query).view(prompts, -1, heads, shared, dim).transpose(1, 2)  # (Q, N_kv, M, g, H)
        slots = slots.reshape(prompts * heads, -1, dim)
        prompt_scores = torch.bmm(slots, prompt_keys.view(-1, longest, dim).transpose(1, 2))
        prompt_scores = prompt_scores.view(prompts, heads, -1, shared, longest)
        if self._padding is not None:
            prompt_scores.masked_fill_(self._padding, -torch.inf)
        response_scores = self._to_slots(response_scores.view(rows, heads, shared, length))
        response_scores = response_scores.view(prompts, -1, heads, shared, length).transpose(1, 2)

        scores = torch.cat([prompt_scores, response_scores], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        flat = weights.view(prompts * heads, -1, longest + length)
        from_prompt = torch.bmm(flat[..., :longest], prompt_values.view(-1, longest, dim))
        from_prompt = from_prompt.view(prompts, heads, -1, shared, dim).transpose(1, 2)
        response_weights = weights[..., longest:].transpose(1, 2).reshape(-1, heads, shared, length)
        from_response = torch.bmm(self._to_rows(response_weights).reshape(rows * heads, shared, length), values)
        from_prompt = self._to_rows(from_prompt.reshape(-1, heads, shared, dim))
        return from_prompt.add_(from_response.view_as(from_prompt)).reshape(rows, heads * shared, dim)

    def _to_slots(self, rows: Tensor) -> Tensor:
        """(S, ...) -> (Q * M, ...)"""
        return rows if self._row_of_slot is None else rows.index_select(0, self._row_of_slot)

    def _to_rows(self, slots: Tensor) -> Tensor:
        """(Q * M, ...) -> (S, ...)"""
        return slots if self._slot_of_row is None else slots.index_select(0, self._slot_of_row)

    def _index_rows(self) -> None:
        """Arrange rows by prompt: slot q * M + j is the j-th row of prompt q; missing ones repeat row 0."""
        device = self.layout.device
        members: list[list[int]] = [[] for _ in self.prompt_lens]
        for row, prompt in enumerate(self.prompt_of_row):
            members[prompt].append(row)
        most = max(1, *map(len, members))
        row_of_slot = [row for rows in members for row in rows + [0] * (most - len(rows))]
        if row_of_slot == list(range(self.num_rows)):
            self._row_of_slot = self._slot_of_row = None
        else:
            slot_of_row = [0] * self.num_rows
            for prompt, rows in enumerate(members):
                for j, row in enumerate(rows):
                    slot_of_row[row] = prompt * most + j
            self._row_of_slot = torch.tensor(row_of_slot, device=device)
            self._slot_of_row = torch.tensor(slot_of_row, device=device)
        longest = self.prompt_keys[0].shape[2]
        self._padding = None
        if min(self.prompt_lens) < longest:
            lens = torch.tensor(self.prompt_lens, device=device).view(-1, 1, 1, 1, 1)
            self._padding = torch.arange(longest, device=device) >= lens

    def _keep_prompts(self, used: list[int]) -> None:
        """Forget the prompts that no row continues."""
        index = torch.tensor(used, dtype=torch.int64, device=self.layout.device)
        self.prompt_lens = [self.prompt_lens[prompt] for prompt in used]
        longest = max(self.prompt_lens, default=0)
        place = {prompt: i for i, prompt in enumerate(used)}
        self.prompt_of_row = [place[prompt] for prompt in self.prompt_of_row]
        for caches in (self.prompt_keys, self.prompt_values):
            for layer, cache in enumerate(caches):
                caches[layer] = cache[:, :, :longest].index_select(0, index)

    def _resize(self, rows: int, capacity: int) -> None:
        for caches in (self.keys, self.values):
            for layer, cache in enumerate(caches):
                new = cache.new_zeros((rows, cache.shape[1], capacity, cache.shape[3]))
                new[: self.num_rows, :, : self.length] = cache[: self.num_rows, :, : self.length]
                caches[layer] = new
        self._capacity_rows = rows


class PrefillPlan:
    """Causal attention of prompts `first`, `first + 1`, ... of a wave; keeps their keys and values in its cache."""

    def __init__(self, wave: Wave, first: int, prompt_lens: list[int]) -> None:
        self._wave = wave
        self._first = first
        self._num_prompts = len(prompt_lens)
        self._longest = max(prompt_lens)
        self._token_of_slot: Tensor | None = None
        self._slot_of_token: Tensor | None = None
        if min(prompt_lens) < self._longest:
            device = wave.layout.device
            lens = torch.tensor(prompt_lens, device=device).unsqueeze(1)
            place = torch.arange(self._longest, device=device).expand(len(prompt_lens), -1)
            start = lens.cumsum(0) - lens
            # right padding repeats a prompt's last token; under a causal mask no real token sees it
            self._token_of_slot = (start + torch.minimum(place, lens - 1)).flatten()
            self._slot_of_token = (place < lens).flatten().nonzero().squeeze(1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """(T, N, H) for the packed prompt tokens."""
        query, key, value = (self._pad(x) for x in (query, key, value))  # (prompts, heads, longest, H)
        rows = slice(self._first, self._first + self._num_prompts)
        self._wave.prompt_keys[layer][rows, :, : self._longest] = key
        self._wave.prompt_values[layer][rows, :, : self._longest] = value
        output = scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=len(query[0]) != len(key[0])
        )
        output = output.transpose(1, 2).flatten(0, 1)
        return output if self._slot_of_token is None else output.index_select(0, self._slot_of_token)

    def _pad(self, x: Tensor) -> Tensor:
        if self._token_of_slot is not None:
            x = x.index_select(1, self._token_of_slot)
        return x.unflatten(1, (self._num_prompts, self._longest)).transpose(0, 1)


class DecodePlan:
    """One new token for every row of every wave, waves one after another in the packed row."""

    def __init__(self, waves: list[Wave]) -> None:
        self.waves = waves
        for wave in waves:
            wave.start_token()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """(S, N, H) for all rows."""
        outputs, start = [], 0
        for wave in self.waves:
            rows = slice(start, start + wave.num_rows)
            outputs.append(wave.attend(layer, query[:, rows], key[:, rows], value[:, rows], scale))
            start = rows.stop
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
