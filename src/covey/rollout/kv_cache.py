"""Keys and values of running responses, and the two attention plans that fill and read them.

A *wave* is a set of prompts admitted together with the rows (responses) that continue them. All rows of a wave are
equally long, so the response part of attention needs no mask. Prompts are padded to the wave's longest one and kept
once, however many responses share them: decode attention is one softmax over [prompt scores | response scores], where
the scores of all responses to a prompt are one matrix product (`_SharedPrompts`). In a wave where every prompt has one
response there is nothing to share: rows hold prompt and response side by side, and attention is one call.

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

    def zeros(self, rows: int, length: int) -> list[Tensor]:
        """One tensor (rows, N_kv, length, H) for each layer."""
        shape = (rows, self.num_kv_heads, length, self.head_dim)
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(self.num_layers)]


class Wave:
    """The caches of one wave. `prompt_of_row` names, for every row, the prompt it continues."""

    def __init__(self, layout: CacheLayout, prompt_lens: list[int], prompt_of_row: list[int], max_length: int) -> None:
        self.layout = layout
        self.prompt_lens = prompt_lens
        self.prompt_of_row = prompt_of_row
        self.num_rows = len(prompt_of_row)  # S
        self.max_length = max_length  # response tokens a row can reach
        self.length = 0  # response tokens in the cache, L
        longest = max(prompt_lens)
        alone = len(prompt_lens) == self.num_rows
        self.prefix = longest if alone else 0  # tokens of the prompt that stand before the response in `keys`
        self.prompt_keys = [] if alone else layout.zeros(len(prompt_lens), longest)  # (Q, N_kv, P, H) for each layer
        self.prompt_values = [] if alone else layout.zeros(len(prompt_lens), longest)
        capacity = self.prefix + min(_FIRST_CAPACITY, max_length)
        self.keys = layout.zeros(self.num_rows, capacity)  # (rows with room, N_kv, tokens with room, H) for each layer
        self.values = layout.zeros(self.num_rows, capacity)
        self._shared = None if alone else _SharedPrompts(prompt_lens, longest, prompt_of_row, layout.device)
        self._visible: Tensor | None = None  # (S, 1, 1, prefix + max_length), only for prompts alone, of unequal length
        if alone and min(prompt_lens) < longest:
            place = torch.arange(longest + max_length, device=layout.device)
            lens = torch.tensor(prompt_lens, device=layout.device).view(-1, 1, 1, 1)
            self._visible = (place < lens) | (place >= longest)

    @property
    def reserved_bytes(self) -> int:
        """Memory the wave can grow to: padded prompts, and every row it has room for at full length."""
        prompts = len(self.prompt_lens) * self.prompt_keys[0].shape[2] if self.prompt_keys else 0
        return (prompts + self.keys[0].shape[0] * (self.prefix + self.max_length)) * self.layout.token_bytes

    def store_prompts(self, layer: int, first: int, keys: Tensor, values: Tensor) -> None:
        """Keep (n, N_kv, length, H) as the beginning of prompts `first`, `first + 1`, ..."""
        place = (slice(first, first + len(keys)), slice(None), slice(keys.shape[2]))
        (self.prompt_keys or self.keys)[layer][place] = keys
        (self.prompt_values or self.values)[layer][place] = values

    def keep_rows(self, order: list[int]) -> None:
        """Row i becomes what row order[i] was; the rows not named are gone."""
        moves = [(i, row) for i, row in enumerate(order) if i != row]
        if moves:
            source = torch.tensor([row for _, row in moves], device=self.layout.device)
            used = self.prefix + self.length
            for cache in (*self.keys, *self.values):
                moved = cache.narrow(2, 0, used).index_select(0, source)
                for (i, _), row in zip(moves, moved, strict=True):  # by slices: some devices assign by index slowly
                    cache[i, :, :used] = row
        self.prompt_of_row = [self.prompt_of_row[row] for row in order]
        self.num_rows = len(order)
        if 2 * self.num_rows <= self.keys[0].shape[0]:
            self._resize(self.num_rows, self.keys[0].shape[2])
        if self._shared is None:
            if self._visible is not None:
                self._visible = self._visible.index_select(0, torch.tensor(order, device=self.layout.device))
            return
        running = sorted(set(self.prompt_of_row))
        if 4 * len(running) <= 3 * len(self.prompt_lens):
            self._keep_prompts(running)
        longest = self.prompt_keys[0].shape[2]
        self._shared = _SharedPrompts(self.prompt_lens, longest, self.prompt_of_row, self.layout.device)

    def start_token(self) -> None:
        """Make room for one more token in every row."""
        if self.prefix + self.length == self.keys[0].shape[2]:
            self._resize(self.keys[0].shape[0], self.prefix + min(2 * self.length, self.max_length))
        self.length += 1

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """(S, N, H): the newest token of every row attends to its prompt and to its response so far."""
        end = self.prefix + self.length
        keys, values = self.keys[layer][: self.num_rows, :, :end], self.values[layer][: self.num_rows, :, :end]
        keys[:, :, -1] = key.transpose(0, 1)
        values[:, :, -1] = value.transpose(0, 1)
        query = query.transpose(0, 1).unflatten(1, (len(key), -1))  # (S, N_kv, g, H)
        if self._shared is None:
            mask = None if self._visible is None else self._visible[..., :end]
            return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale).flatten(1, 2)
        prompt_keys, prompt_values = self.prompt_keys[layer], self.prompt_values[layer]
        return self._shared.attend(query * scale, prompt_keys, prompt_values, keys.flatten(0, 1), values.flatten(0, 1))

    def _keep_prompts(self, used: list[int]) -> None:
        """Forget the prompts that no row continues."""
        index = torch.tensor(used, device=self.layout.device)
        self.prompt_lens = [self.prompt_lens[prompt] for prompt in used]
        longest = max(self.prompt_lens)
        place = {prompt: i for i, prompt in enumerate(used)}
        self.prompt_of_row = [place[prompt] for prompt in self.prompt_of_row]
        for caches in (self.prompt_keys, self.prompt_values):
            for layer, cache in enumerate(caches):
                caches[layer] = cache[:, :, :longest].index_select(0, index)

    def _resize(self, rows: int, capacity: int) -> None:
        live = (slice(self.num_rows), slice(None), slice(self.prefix + self.length))
        for caches in (self.keys, self.values):
            for layer, cache in enumerate(caches):
                new = cache.new_zeros((rows, cache.shape[1], capacity, cache.shape[3]))
                new[live] = cache[live]
                caches[layer] = new


class _SharedPrompts:
    """Attention of rows to prompts that several of them share: rows are arranged in slots, M for every prompt.

    Slot q * M + j holds the j-th row of prompt q; slots without a row repeat row 0 and are not read back.
    """

    def __init__(self, prompt_lens: list[int], longest: int, prompt_of_row: list[int], device: torch.device) -> None:
        members: list[list[int]] = [[] for _ in prompt_lens]
        for row, prompt in enumerate(prompt_of_row):
            members[prompt].append(row)
        most = max(map(len, members))
        row_of_slot = [row for rows in members for row in rows + [0] * (most - len(rows))]
        self._row_of_slot: Tensor | None = None  # None: slots are rows
        self._slot_of_row: Tensor | None = None
        if row_of_slot != list(range(len(prompt_of_row))):
            slot_of_row = {row: q * most + j for q, rows in enumerate(members) for j, row in enumerate(rows)}
            self._row_of_slot = torch.tensor(row_of_slot, device=device)
            self._slot_of_row = torch.tensor([slot_of_row[row] for row in range(len(prompt_of_row))], device=device)
        self._padding: Tensor | None = None  # (Q, 1, 1, 1, P)
        if min(prompt_lens) < longest:
            lens = torch.tensor(prompt_lens, device=device).view(-1, 1, 1, 1, 1)
            self._padding = torch.arange(longest, device=device) >= lens

    def attend(
        self,
        query: Tensor,  # (S, N_kv, g, H), scaled
        prompt_keys: Tensor,  # (Q, N_kv, P, H)
        prompt_values: Tensor,
        keys: Tensor,  # (S * N_kv, L, H)
        values: Tensor,
    ) -> Tensor:
        """(S, N, H)"""
        rows, heads, shared, dim = query.shape
        prompts, _, longest, _ = prompt_keys.shape
        query = query.contiguous()
        slots = self._to_slots(query).view(prompts, -1, heads, shared, dim).transpose(1, 2)  # (Q, N_kv, M, g, H)
        prompt_scores = torch.bmm(
            slots.reshape(prompts * heads, -1, dim), prompt_keys.view(-1, longest, dim).transpose(1, 2)
        ).view(prompts, heads, -1, shared, longest)
        if self._padding is not None:
            prompt_scores.masked_fill_(self._padding, -torch.inf)
        response_scores = torch.bmm(query.view(-1, shared, dim), keys.transpose(1, 2)).view(rows, heads, shared, -1)
        response_scores = self._to_slots(response_scores).unflatten(0, (prompts, -1)).transpose(1, 2)

        scores = torch.cat([prompt_scores, response_scores], dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)  # (Q, N_kv, M, g, P + L)

        from_prompt = torch.bmm(
            weights.view(prompts * heads, -1, weights.shape[-1])[..., :longest], prompt_values.view(-1, longest, dim)
        )
        from_prompt = from_prompt.view(prompts, heads, -1, shared, dim).transpose(1, 2).flatten(0, 1)
        response_weights = self._to_rows(weights[..., longest:].transpose(1, 2).flatten(0, 1))
        from_response = torch.bmm(response_weights.reshape(-1, shared, keys.shape[1]), values)
        output = from_response.view(rows, heads, shared, dim).add_(self._to_rows(from_prompt))
        return output.view(rows, heads * shared, dim)

    def _to_slots(self, rows: Tensor) -> Tensor:
        """(S, ...) -> (Q * M, ...)"""
        return rows if self._row_of_slot is None else rows.index_select(0, self._row_of_slot)

    def _to_rows(self, slots: Tensor) -> Tensor:
        """(Q * M, ...) -> (S, ...)"""
        return slots if self._slot_of_row is None else slots.index_select(0, self._slot_of_row)


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
        self._wave.store_prompts(layer, self._first, key, value)
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
