"""Other ways to compute the same log-probabilities: transformers' eager attention, padded or one sequence at a time.

They take the place of the packed forward in a `Policy`; loss, gradient and update stay the real ones. One process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from covey.tools.align.rows import Layout, Place
from covey.types import Group, PackedBatch

PATHS = ("packed", "padded", "sequence")
_PAD = 0  # any id: padding is masked by lengths, and nothing reads what it gives


class EagerPath:
    """`score` and `accumulate` of covey.parallel.ParallelModel, on whole sequences."""

    def __init__(
        self,
        model: Any,
        groups: Sequence[Group],
        layout: Layout,
        *,
        temperature: float,
        padded: bool,
        expect: Callable[[Place, tuple[int, int]], None],
    ) -> None:
        """model: a causal LM whose attention implementation is transformers' own. padded: all responses at once."""
        self._model = model
        self._layout = layout
        self._temperature = temperature
        self._padded = padded
        self._expect = expect
        self._sequences = [(g.prompt.input_ids, r.token_ids) for g in groups for r in g.responses]

    @torch.no_grad()
    def score(
        self, batches: Sequence[PackedBatch], *, as_sampled: bool = False
    ) -> Iterator[tuple[PackedBatch, Tensor, Tensor]]:
        """See covey.passes.Passes.score."""
        for batch in batches:
            yield batch, *self._run(batch, as_sampled)

    def accumulate(
        self, batches: Sequence[PackedBatch], loss_of: Callable[..., Tensor], *, as_sampled: bool = False
    ) -> None:
        """See covey.passes.Passes.accumulate."""
        for batch in batches:
            loss_of(batch, *self._run(batch, as_sampled)).backward()

    def _run(self, batch: PackedBatch, as_sampled: bool) -> tuple[Tensor, Tensor]:
        """(log-probabilities, entropies) of the batch's response tokens, both (n,) fp32."""
        if as_sampled:
            raise ValueError("algorithm.sampling_consistent is on: only --path packed renormalises as the sampler did")
        ids = batch.response_ids
        parts = [ids] if self._padded else [[i] for i in ids]
        found = [self._forward(part, batch.input_ids.device) for part in parts]
        return torch.cat([lp for lp, _ in found]), torch.cat([entropy for _, entropy in found])

    def _forward(self, responses: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        chosen = [self._sequences[i] for i in responses]
        inputs = [[*prompt, *answer[:-1]] for prompt, answer in chosen]
        width = max(len(ids) for ids in inputs)
        padded = torch.tensor([[*ids, *[_PAD] * (width - len(ids))] for ids in inputs], device=device)
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in inputs], device=device)
        positions = torch.arange(width, device=device).expand(len(inputs), width)
        place = self._layout.of_sequences(responses, [len(ids) for ids in inputs], width)
        self._expect(place, (len(inputs), width))
        logits = self._model(
            input_ids=padded, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits.float()
        logprobs, entropies = [], []
        for row, (prompt, answer) in enumerate(chosen):
            start = len(prompt) - 1
            own = (logits[row, start : start + len(answer)] / self._temperature).log_softmax(-1)
            logprobs.append(own.gather(1, torch.tensor(answer, device=device)[:, None]).squeeze(1))
            entropies.append(-(own.exp() * own).sum(-1))
        return torch.cat(logprobs), torch.cat(entropies)
