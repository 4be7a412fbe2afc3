"""Sample responses on the training model's own modules: continuous batching with a shared prompt cache.

Every prompt is run once and its keys and values serve all of its responses (`kv_cache.py`). A decode step runs one new
token of every live response as a single packed row through the model's linear layers, then draws the next tokens
(`sampling.py`). Responses leave when they end and waiting prompts enter (`schedule.py`).

Because the modules are the trained ones, `load_weights` only stamps a version: there is nothing to copy.

Left out: sharded models, chunked prefill of one long prompt, reuse of a prefix that different prompts share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covey.models.attention import ATTENTION, AttentionPlan
from covey.rollout.engine import Sampling
from covey.rollout.kv_cache import CacheLayout, DecodePlan, PrefillPlan, Wave
from covey.rollout.sampling import Draw, draw, uniforms
from covey.rollout.schedule import Limits, Part, admit, split
from covey.types import FinishReason, Group, Prompt, Response

_PREFILL_TOKENS = 8192  # prompt tokens run at once


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
                f"the model's attention is {config._attn_implementation!r}: "
                f"call model.set_attn_implementation({ATTENTION!r}) before NativeEngine(model)"
            )
        if max_num_seqs < 1:
            raise ValueError(f"rollout.max_num_seqs is {max_num_seqs}, but at least one response must run: set it to 1")
        head = model.get_output_embeddings().weight
        self._model = model
        self._stop = frozenset(stop_token_ids)
        self._decode = decode
        self._version = 0
        self._layout = CacheLayout(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            dtype=head.dtype,
            device=head.device,
        )
        self._limits = Limits(max_num_seqs, kv_cache_bytes, self._layout.token_bytes)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Stamp `version` on what is sampled from now on; the weights are the policy's own tensors already."""
        del weights
        self._version = version

    def generate(
        self, prompts: list[Prompt], sampling: Sampling, *, on_group: Callable[[int, Group], None] | None = None
    ) -> list[Group]:
        """G responses for each prompt, in the order of `prompts`; on_group(index, group) as soon as one is complete.

        Raises ValueError for an empty prompt and when a prompt with one response does not fit in `kv_cache_bytes`.
        """
        waiting = deque(split(prompts, sampling, self._limits))
        finished: list[dict[int, Response]] = [{} for _ in prompts]
        groups: dict[int, Group] = {}
        running: list[_Running] = []
        with _evaluating(self._model), torch.no_grad():
            while waiting or running:
                done = []
                for parts in self._admit(waiting, running, sampling):
                    wave, logits = self._start(parts, sampling)
                    done += self._advance([wave], logits, sampling)
                    running.append(wave)
                running = [wave for wave in running if wave.rows]
                if running:
                    done += self._advance(running, self._decode_logits(running), sampling)
                    running = [wave for wave in running if wave.rows]
                for row, response in done:
                    finished[row.index][row.sample] = response
                    if len(finished[row.index]) == sampling.num_samples:
                        responses = [response for _, response in sorted(finished[row.index].items())]
                        group = groups[row.index] = Group(prompts[row.index], responses)
                        if on_group is not None:
                            on_group(row.index, group)
        return [groups[index] for index in range(len(prompts))]

    def _admit(self, waiting: deque[Part], running: list[_Running], sampling: Sampling) -> list[list[Part]]:
        return admit(
            waiting,
            limits=self._limits,
            num_waves=len(running),
            num_rows=sum(len(wave.rows) for wave in running),
            reserved_bytes=sum(wave.cache.reserved_bytes for wave in running),
            max_response_length=sampling.max_response_length,
        )

    def _start(self, parts: list[Part], sampling: Sampling) -> tuple[_Running, Tensor]:
        """Run the prompts of a new wave; returns it with the logits (S, V) of every row's first token."""
        device = self._layout.device
        prompt_lens = [part.length for part in parts]
        samples = [(i, part, sample) for i, part in enumerate(parts) for sample in range(part.first, part.last)]
        prompt_of_row = [i for i, _, _ in samples]
        cache = Wave(self._layout, prompt_lens, prompt_of_row, sampling.max_response_length)
        logits, first = [], 0
        while first < len(parts):
            last, tokens = first + 1, prompt_lens[first]
            while last < len(parts) and tokens + prompt_lens[last] <= _PREFILL_TOKENS:
                tokens += prompt_lens[last]
                last += 1
            logits.append(self._prefill_logits(cache, first, [part.prompt.input_ids for part in parts[first:last]]))
            first = last
        streams = [uniforms(sampling, uid=part.prompt.uid, sample=sample) for _, part, sample in samples]
        index = torch.tensor(prompt_of_row, device=device)
        wave = _Running(
            cache=cache,
            rows=[_Row(part.index, sample) for _, part, sample in samples],
            prompt_lens=torch.tensor(prompt_lens, device=device)[index],
            uniforms=torch.from_numpy(np.stack(streams, axis=1)).to(device),
            stream=torch.arange(len(samples), device=device),
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
        # weight first: for few rows CPU libraries run this product up to twice as fast as hidden @ weight.t()
        logits = (head.weight @ (hidden if rows is None else hidden[rows]).t()).t().contiguous()
        return logits if head.bias is None else logits.add_(head.bias)

    def _advance(self, running: list[_Running], logits: Tensor, sampling: Sampling) -> list[tuple[_Row, Response]]:
        """Draw one token for every row and take the finished rows out of their waves; returns those."""
        places = [len(wave.rows[0].token_ids) for wave in running]
        uniform = torch.cat(
            [wave.uniforms[place].index_select(0, wave.stream) for wave, place in zip(running, places, strict=True)]
        )
        drawn = draw(logits, uniform, sampling)
        columns = zip(*_to_host(drawn), strict=True)
        done: list[tuple[_Row, Response]] = []
        start = 0
        for wave in running:
            wave.token_ids = drawn.token_ids[start : start + len(wave.rows)]
            start += len(wave.rows)
            live = []
            for i, row in enumerate(wave.rows):
                token_id, logprob, num_kept = next(columns)
                row.token_ids.append(token_id)
                row.logprobs.append(logprob)
                row.num_kept.append(num_kept)
                if token_id in self._stop:
                    done.append((row, self._finish(row, "stop", filtered=drawn.num_kept is not None)))
                elif len(row.token_ids) == sampling.max_response_length:
                    done.append((row, self._finish(row, "length", filtered=drawn.num_kept is not None)))
                else:
                    live.append(i)
            if len(live) < len(wave.rows):
                _keep_rows(wave, live)
        return done

    def _finish(self, row: _Row, reason: FinishReason, *, filtered: bool) -> Response:
        return Response(
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            text=self._decode(row.token_ids[:-1] if reason == "stop" else row.token_ids),
            finish_reason=reason,
            num_kept=row.num_kept if filtered else None,
            policy_version=self._version,
        )


def _to_host(drawn: Draw) -> tuple[list[int], list[float], list[int]]:
    """Token ids, logprobs and sizes of the kept set in one transfer: a step's only wait for the device."""
    token_ids = drawn.token_ids.int()
    num_kept = token_ids if drawn.num_kept is None else drawn.num_kept.int()
    host = torch.stack([token_ids, drawn.logprobs.view(torch.int32), num_kept]).cpu().numpy()
    return host[0].tolist(), host[1].view(np.float32).tolist(), host[2].tolist()


def _keep_rows(wave: _Running, live: list[int]) -> None:
    """Drop the finished rows: the last live ones move into the places that became free."""
    places = set(live)
    movers = iter([row for row in reversed(live) if row >= len(live)])
    order = [i if i in places else next(movers) for i in range(len(live))]
    wave.rows = [wave.rows[i] for i in order]
    if order:
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
