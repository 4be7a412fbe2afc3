"""Sample responses on the training model's own modules: continuous batching with a shared prompt cache.

Every prompt is run once and its keys and values serve all of its responses (`kv_cache.py`). A decode step runs one new
token of every live response as a single packed row through the model's linear layers, then draws the next tokens
(`sampling.py`). Responses leave when they end; waiting prompts enter once a quarter of the places is free.

Because the modules are the trained ones, `load_weights` only stamps a version: there is nothing to copy.

Left out: sharded models, chunked prefill of one long prompt, prefix reuse across different prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from covey.models.attention import ATTENTION, AttentionPlan
from covey.rollout.engine import Sampling
from covey.rollout.kv_cache import CacheLayout, DecodePlan, PrefillPlan, Wave
from covey.rollout.sampling import draw, uniforms
from covey.types import FinishReason, Group, Prompt, Response

_PREFILL_TOKENS = 8192  # prompt tokens run at once
_PAD_TOKENS = 32  # prompts this close in length share a wave, whatever the ratio
_PAD_SHARE = 0.25  # otherwise at most this share of a prompt's cache may be padding
_MANY_WAVES = 8  # with so many waves, wait for half of the places instead of a quarter


@dataclass(frozen=True)
class _Part:
    """Samples [first, last) of the prompt at `index`: what is admitted at once. Usually the whole group."""

    index: int
    prompt: Prompt
    first: int
    last: int


@dataclass
class _Row:
    """One response being sampled."""

    index: int  # of the prompt
    sample: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_kept: list[int] = field(default_factory=list)


@dataclass
class _Running:
    """A wave's cache with what the loop knows about its rows, in the same order."""

    cache: Wave
    rows: list[_Row]
    prompt_lens: Tensor  # (S,) int64
    uniforms: Tensor  # (max_response_length, rows admitted) fp32
    stream: Tensor  # (S,) int64, column of `uniforms` that belongs to the row
    token_ids: Tensor  # (S,) int64, drawn and not yet run

    def next_uniforms(self, place: int) -> Tensor:
        return self.uniforms[place].index_select(0, self.stream)


class NativeEngine:
    """RolloutEngine on a Hugging Face causal LM whose attention implementation is `covey`."""

    def __init__(
        self,
        model: Any,
        *,
        stop_token_ids: Iterable[int],
        decode: Callable[[list[int]], str],
        max_num_seqs: int,  # responses sampled at the same time
        kv_cache_bytes: int,  # limit on the keys and values held, all layers together
    ) -> None:
        config = model.config.get_text_config()
        if config._attn_implementation != ATTENTION:
            raise ValueError(
                f"the model's attention is {config._attn_implementation!r}; "
                f"call model.set_attn_implementation({ATTENTION!r}) before NativeEngine(model)"
            )
        if max_num_seqs < 1:
            raise ValueError(
                f"rollout.max_num_seqs is {max_num_seqs}; at least one response must run: set it to 1 or more"
            )
        head = model.get_output_embeddings().weight
        self._model = model
        self._stop = frozenset(stop_token_ids)
        self._decode = decode
        self._max_num_seqs = max_num_seqs
        self._kv_cache_bytes = kv_cache_bytes
        self._version = 0
        self._layout = CacheLayout(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            dtype=head.dtype,
            device=head.device,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Stamp `version` on what is sampled from now on; the weights are the policy's own tensors already."""
        del weights
        self._version = version

    def generate(
        self, prompts: list[Prompt], sampling: Sampling, *, on_group: Callable[[int, Group], None] | None = None
    ) -> list[Group]:
        """G responses for each prompt, in the order of `prompts`; on_group(index, group) as soon as one is complete.

        Raises ValueError for an empty prompt and when one response does not fit in `kv_cache_bytes`.
        """
        waiting = deque(self._split(prompts, sampling))
        done: list[list[Response | None]] = [[None] * sampling.num_samples for _ in prompts]
        groups: list[Group | None] = [None] * len(prompts)
        running: list[_Running] = []
        with _evaluating(self._model), torch.no_grad():
            while waiting or running:
                started = [self._start(parts, sampling) for parts in self._admit(waiting, running, sampling)]
                for wave, logits in started:
                    self._advance([wave], logits, sampling, done)
                running = [wave for wave in running + [wave for wave, _ in started] if wave.rows]
                if running:
                    self._advance(running, self._decode_logits(running), sampling, done)
                    running = [wave for wave in running if wave.rows]
                for index, responses in enumerate(done):
                    if groups[index] is None and None not in responses:
                        groups[index] = Group(prompts[index], [r for r in responses if r is not None])
                        if on_group is not None:
                            on_group(index, groups[index])
        return [group for group in groups if group is not None]

    def _split(self, prompts: list[Prompt], sampling: Sampling) -> Iterator[_Part]:
        """Groups in descending order of prompt length, cut where they exceed the places or the cache."""
        room = self._kv_cache_bytes // self._layout.token_bytes
        for index in sorted(range(len(prompts)), key=lambda i: -len(prompts[i].input_ids)):
            length = len(prompts[index].input_ids)
            if not length:
                raise ValueError(
                    f"prompt {prompts[index].uid} has no tokens; drop the row or check the prompt template"
                )
            fitting = (room - length) // sampling.max_response_length
            if fitting < 1:
                needed = (length + sampling.max_response_length) * self._layout.token_bytes
                raise ValueError(
                    f"rollout.kv_cache_bytes is {self._kv_cache_bytes}, but prompt {prompts[index].uid} ({length} tokens) "
                    f"with one response of {sampling.max_response_length} tokens needs {needed}; raise it or shorten them"
                )
            size = min(sampling.num_samples, self._max_num_seqs, fitting)
            for first in range(0, sampling.num_samples, size):
                yield _Part(index, prompts[index], first, min(first + size, sampling.num_samples))

    def _admit(self, waiting: deque[_Part], running: list[_Running], sampling: Sampling) -> list[list[_Part]]:
        """Take what fits from `waiting`; one list per new wave."""
        places = self._max_num_seqs - sum(len(wave.rows) for wave in running)
        share = 4 if len(running) < _MANY_WAVES else 2
        if running and places * share < self._max_num_seqs:
            return []
        room = self._kv_cache_bytes - sum(wave.cache.reserved_bytes for wave in running)
        waves: list[list[_Part]] = []
        while waiting:
            part = waiting[0]
            length, count = len(part.prompt.input_ids), part.last - part.first
            longest = len(waves[-1][0].prompt.input_ids) if waves else length
            joins = bool(waves) and longest - length <= max(_PAD_TOKENS, _PAD_SHARE * longest)
            padded = longest if joins else length
            room -= (padded + count * sampling.max_response_length) * self._layout.token_bytes
            places -= count
            if room < 0 or places < 0:
                break
            waves[-1].append(waiting.popleft()) if joins else waves.append([waiting.popleft()])
        return waves

    def _start(self, parts: list[_Part], sampling: Sampling) -> tuple[_Running, Tensor]:
        """Run the prompts of a new wave; returns it with the logits (S, V) of every row's first token."""
        device = self._layout.device
        prompt_lens = [len(part.prompt.input_ids) for part in parts]
        prompt_of_row = [i for i, part in enumerate(parts) for _ in range(part.first, part.last)]
        rows = [_Row(part.index, sample) for part in parts for sample in range(part.first, part.last)]
        streams = [
            uniforms(sampling, uid=part.prompt.uid, sample=sample)
            for part in parts
            for sample in range(part.first, part.last)
        ]
        cache = Wave(self._layout, prompt_lens, prompt_of_row, sampling.max_response_length)
        logits, first = [], 0
        while first < len(parts):
            last, tokens = first + 1, prompt_lens[first]
            while last < len(parts) and tokens + prompt_lens[last] <= _PREFILL_TOKENS:
                tokens += prompt_lens[last]
                last += 1
            logits.append(self._prefill_logits(cache, first, [part.prompt.input_ids for part in parts[first:last]]))
            first = last
        index = torch.tensor(prompt_of_row, device=device)
        wave = _Running(
            cache=cache,
            rows=rows,
            prompt_lens=torch.tensor(prompt_lens, device=device)[index],
            uniforms=torch.from_numpy(np.stack(streams, axis=1)).to(device),
            stream=torch.arange(len(rows), device=device),
            token_ids=index,  # replaced by the first draw
        )
        return wave, torch.cat(logits)[index]

    def _prefill_logits(self, cache: Wave, first: int, prompts: list[list[int]]) -> Tensor:
        """(prompts, V) at the last token of each prompt."""
        device = self._layout.device
        lens = [len(ids) for ids in prompts]
        input_ids = torch.tensor([token for ids in prompts for token in ids], device=device)
        position_ids = torch.cat([torch.arange(n, device=device) for n in lens])
        last_rows = torch.tensor(lens, device=device).cumsum(0) - 1
        return self._logits(input_ids, position_ids, PrefillPlan(cache, first, lens), rows=last_rows)

    def _decode_logits(self, running: list[_Running]) -> Tensor:
        """(S, V) after running the last drawn token of every row of every wave."""
        input_ids = torch.cat([wave.token_ids for wave in running])
        position_ids = torch.cat([wave.prompt_lens + wave.cache.length for wave in running])
        return self._logits(input_ids, position_ids, DecodePlan([wave.cache for wave in running]))

    def _logits(
        self, input_ids: Tensor, position_ids: Tensor, plan: AttentionPlan, *, rows: Tensor | None = None
    ) -> Tensor:
        hidden = self._model.model(
            input_ids=input_ids.unsqueeze(0), position_ids=position_ids.unsqueeze(0), plan=plan, use_cache=False
        ).last_hidden_state[0]
        head = self._model.get_output_embeddings()
        return F.linear(hidden if rows is None else hidden[rows], head.weight, head.bias)

    def _advance(
        self, running: list[_Running], logits: Tensor, sampling: Sampling, done: list[list[Response | None]]
    ) -> None:
        """Draw one token for every row, record it, and take the finished rows out of their waves."""
        uniform = torch.cat([wave.next_uniforms(len(wave.rows[0].token_ids)) for wave in running])
        drawn = draw(logits, uniform, sampling)
        columns = [drawn.token_ids.int(), drawn.logprobs.view(torch.int32)]
        if drawn.num_kept is not None:
            columns.append(drawn.num_kept.int())
        host = torch.stack(columns).cpu().numpy()  # the step's only wait for the device
        token_ids, logprobs = host[0].tolist(), host[1].view(np.float32).tolist()
        num_kept = host[2].tolist() if drawn.num_kept is not None else None
        start = 0
        for wave in running:
            live = []
            for i, row in enumerate(wave.rows):
                row.token_ids.append(token_ids[start + i])
                row.logprobs.append(logprobs[start + i])
                if num_kept is not None:
                    row.num_kept.append(num_kept[start + i])
                stopped = token_ids[start + i] in self._stop
                if stopped or len(row.token_ids) == sampling.max_response_length:
                    done[row.index][row.sample] = self._finish(row, "stop" if stopped else "length")
                else:
                    live.append(i)
            wave.token_ids = drawn.token_ids[start : start + len(wave.rows)]
            start += len(wave.rows)
            if len(live) < len(wave.rows):
                _keep_rows(wave, live)

    def _finish(self, row: _Row, reason: FinishReason) -> Response:
        return Response(
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            text=self._decode(row.token_ids[:-1] if reason == "stop" else row.token_ids),
            finish_reason=reason,
            num_kept=row.num_kept or None,
            policy_version=self._version,
        )


def _keep_rows(wave: _Running, live: list[int]) -> None:
    """Drop the finished rows: the last live ones move into the places that became free."""
    places = set(live)
    movers = iter(row for row in reversed(live) if row >= len(live))
    order = [i if i in places else next(movers) for i in range(len(live))]
    wave.rows = [wave.rows[i] for i in order]
    if not order:
        return
    wave.cache.keep_rows(order)
    index = torch.tensor(order, device=wave.token_ids.device)
    wave.prompt_lens = wave.prompt_lens[index]
    wave.stream = wave.stream[index]
    wave.token_ids = wave.token_ids[index]


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Dropout off while sampling; the mode is put back afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
