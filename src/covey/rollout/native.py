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
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from covey.models.attention import ATTENTION, AttentionPlan
from covey.rollout.engine import Sampling
from covey.rollout.kv_cache import CacheLayout, DecodePlan, PrefillPlan, Wave
from covey.rollout.sampling import Draw, draw, uniforms
from covey.rollout.schedule import Limits, Part, admit, split
from covey.types import FinishReason, Group, Prompt, Response

_PREFILL_TOKENS = 8192  # prompt tokens run at once
_FEW_ROWS = 32  # up to here CPU libraries compute weight @ hidden.t() faster than hidden @ weight.t(), up to twice


@dataclass
class _Running:
    """A wave's cache with what the loop knows about it. A row's column never changes; rows move when others leave."""

    cache: Wave
    samples: list[tuple[int, int]]  # (index of the prompt, sample) for each column
    columns: list[int]  # column of each of the S rows
    record: np.ndarray  # (3, max_response_length, columns) int32: token ids, logprobs as bits, sizes of the kept set
    uniforms: Tensor  # (max_response_length, columns) fp32
    stream: Tensor  # (S,) int64, `columns` on the device
    prompt_lens: Tensor  # (S,) int64
    token_ids: Tensor  # (S,) int64, drawn and not yet run
    num_tokens: int = 0  # drawn for each row


class NativeEngine:
    """RolloutEngine on a Hugging Face causal LM whose attention implementation is `covey`."""

    def __init__(
        self,
        model: Any,
        *,
        stop_token_ids: Iterable[int],
        decode: Callable[[list[int]], str],
        max_num_seqs: int,  # responses sampled at the same time
        tp_size: int = 1,  # ranks that the model's heads are cut over
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
        # A head that has a part of the vocabulary puts the parts of all ranks together.
        self._gather_vocabulary: Callable[[Tensor], Tensor] = getattr(
            model.get_output_embeddings(), "gather", lambda logits: logits
        )
        self._stop = np.array(sorted(set(stop_token_ids)), np.int32)
        self._decode = decode
        self._version = 0
        self._layout = CacheLayout(
            num_layers=config.num_hidden_layers,
            num_kv_heads=config.num_key_value_heads // tp_size,
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
                running = [wave for wave in running if wave.columns]
                if running:
                    done += self._advance(running, self._decode_logits(running), sampling)
                    running = [wave for wave in running if wave.columns]
                for index, sample, response in done:
                    finished[index][sample] = response
                    if len(finished[index]) == sampling.num_samples:
                        group = groups[index] = Group(prompts[index], [r for _, r in sorted(finished[index].items())])
                        if on_group is not None:
                            on_group(index, group)
        return [groups[index] for index in range(len(prompts))]

    def _admit(self, waiting: deque[Part], running: list[_Running], sampling: Sampling) -> list[list[Part]]:
        return admit(
            waiting,
            limits=self._limits,
            num_waves=len(running),
            num_rows=sum(len(wave.columns) for wave in running),
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
            samples=[(part.index, sample) for _, part, sample in samples],
            columns=list(range(len(samples))),
            record=np.empty((3, sampling.max_response_length, len(samples)), np.int32),
            uniforms=torch.from_numpy(np.stack(streams, axis=1)).to(device),
            stream=torch.arange(len(samples), device=device),
            prompt_lens=torch.tensor([prompt_lens[i] for i in prompt_of_row], device=device),
            token_ids=index,  # replaced by the first draw
        )
        return wave, torch.cat(logits).index_select(0, index)

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
        hidden = hidden if rows is None else hidden.index_select(0, rows)
        head = self._model.get_output_embeddings()
        if len(hidden) > _FEW_ROWS:
            logits = linear(hidden, head.weight, head.bias)
        else:
            logits = (head.weight @ hidden.t()).t()
            logits = logits if head.bias is None else logits + head.bias
        return self._gather_vocabulary(logits)

    def _advance(self, running: list[_Running], logits: Tensor, sampling: Sampling) -> list[tuple[int, int, Response]]:
        """Draw one token for every row, and take the rows that end out of their waves.

        Returns (index of the prompt, sample, response) of those.
        """
        uniform = torch.cat([wave.uniforms[wave.num_tokens].index_select(0, wave.stream) for wave in running])
        drawn = draw(logits, uniform, sampling)
        host = _to_host(drawn)
        stopped = np.isin(host[0], self._stop)
        done: list[tuple[int, int, Response]] = []
        start = 0
        for wave in running:
            rows = slice(start, start + len(wave.columns))
            start = rows.stop
            wave.token_ids = drawn.token_ids[rows]
            wave.record[:, wave.num_tokens, wave.columns] = host[:, rows]
            wave.num_tokens += 1
            full = wave.num_tokens == sampling.max_response_length
            ended = np.full(len(wave.columns), True) if full else stopped[rows]
            for row in ended.nonzero()[0]:
                column = wave.columns[row]
                reason = "stop" if stopped[rows][row] else "length"
                filtered = drawn.num_kept is not None
                done.append((*wave.samples[column], self._finish(wave, column, reason, filtered=filtered)))
            if ended.any():
                _keep_rows(wave, (~ended).nonzero()[0].tolist())
        return done

    def _finish(self, wave: _Running, column: int, reason: FinishReason, *, filtered: bool) -> Response:
        token_ids, logprobs, num_kept = wave.record[:, : wave.num_tokens, column].copy()
        return Response(
            token_ids=token_ids.tolist(),
            logprobs=logprobs.view(np.float32).tolist(),
            text=self._decode(token_ids[: -1 if reason == "stop" else None].tolist()),
            finish_reason=reason,
            num_kept=num_kept.tolist() if filtered else None,
            policy_version=self._version,
        )


def _to_host(drawn: Draw) -> np.ndarray:
    """(3, S) int32: token ids, logprobs as bits, sizes of the kept set. A step's only wait for the device."""
    token_ids = drawn.token_ids.int()
    num_kept = token_ids if drawn.num_kept is None else drawn.num_kept.int()
    return torch.stack([token_ids, drawn.logprobs.view(torch.int32), num_kept]).cpu().numpy()


def _keep_rows(wave: _Running, live: list[int]) -> None:
    """Drop the ended rows: the last live ones move into the places that became free."""
    places = set(live)
    movers = iter([row for row in reversed(live) if row >= len(live)])
    order = [i if i in places else next(movers) for i in range(len(live))]
    wave.columns = [wave.columns[row] for row in order]
    if order:
        wave.cache.keep_rows(order)
        index = torch.tensor(order, device=wave.token_ids.device)
        wave.stream = wave.stream.index_select(0, index)
        wave.prompt_lens = wave.prompt_lens.index_select(0, index)
        wave.token_ids = wave.token_ids.index_select(0, index)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Dropout off while sampling; the mode is put back afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
