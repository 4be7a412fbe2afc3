"""Two bundles side by side: the same rows of the same step, and what their facts say about a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from covey.tools.align.bundle import Bundle
from covey.tools.align.facts import differences
from covey.tools.align.fingerprint import relation
from covey.tools.align.hooks import ATTENTION, EMBEDDING, FINAL_NORM, LOGITS, OUTPUT, ROPE, Key

_IDS = ("tokenizer_eos", "config_eos", "generation_eos", "stop_ids")


@dataclass(frozen=True)
class Fact:
    """Something that is not a number of the forward and must agree. `kind` is the cause that it is."""

    kind: str
    text: str


class Pair:
    """A is the reference, B is compared with it."""

    def __init__(self, a: Bundle, b: Bundle) -> None:
        self.a, self.b = a, b
        have = {(step.rung, step.name) for step in b.steps}
        self.keys: list[Key] = [(s.rung, s.name) for s in a.steps if (s.rung, s.name) in have]
        self._at = {name: _common(a.tensors[name], b.tensors[name]) for name in ("rows", "logit_rows")}
        self._facts = self._collect_facts()

    @property
    def same_ids(self) -> bool:
        """Whether both ran the same tokens."""
        names = ("prompt_ids", "prompt_lens", "response_ids", "response_lens")
        return all(torch.equal(self.a.tensors[n], self.b.tensors[n]) for n in names) and (
            self.a.meta["group_sizes"] == self.b.meta["group_sizes"]
        )

    def values(self, rung: str, name: str) -> tuple[Tensor, Tensor] | None:
        """The common rows of a step in A and in B, in their own numbers; None when one lacks it."""
        a, b = self.a.values(rung, name), self.b.values(rung, name)
        if a is None or b is None:
            return None
        mine, its = self._at["logit_rows" if rung == LOGITS else "rows"]
        return a[mine], b[its]

    def norms(self, rung: str, name: str) -> tuple[Tensor, Tensor] | None:
        """The norms of all rows of a step in A and in B."""
        found = []
        for bundle in (self.a, self.b):
            key = next((s.key for s in bundle.steps if (s.rung, s.name) == (rung, name)), None)
            found.append(None if key is None else bundle.tensors.get(f"norms/{key}"))
        a, b = found
        return None if a is None or b is None else (a, b)

    def rows_of(self, what: str) -> np.ndarray:
        """`group`, `sample` (-1: prompt) or `position` of every common row."""
        return self.a.tensors[f"row_{what}"].numpy()[self.a.tensors["rows"].numpy()[self._at["rows"][0]]]

    @property
    def num_witness(self) -> int:
        """Leading common rows without a gap that are a prefix of one sequence."""
        rows = self.a.tensors["rows"].numpy()[self._at["rows"][0]]
        group, sample = self.rows_of("group"), self.rows_of("sample")
        inside = (rows == np.arange(len(rows))) & (group == 0) & (sample <= 0)
        return int(np.argmin(inside)) if not inside.all() else len(rows)

    def facts(self, rung: str, name: str) -> list[Fact]:
        """What must agree at a step and does not."""
        return self._facts.get((rung, name), [])

    def settings(self, *sections: str) -> list[str]:
        """Settings that differ, as `key: A, B`."""
        a, b = self.a.meta["settings"], self.b.meta["settings"]
        return [text for section in sections for text in differences(a[section], b[section], f"{section}.")]

    def _collect_facts(self) -> dict[Key, list[Fact]]:
        found: dict[Key, list[Fact]] = {}
        for key, fact in [*self._ids(), *self._numbers(), *self._weights()]:
            found.setdefault(self._step_of(key), []).append(fact)
        return found

    def _step_of(self, key: Key) -> Key:
        """The step, or the one that stands for it where the steps within layers were not captured."""
        if key in self.keys or key[0] not in {rung for rung, _ in self.keys}:
            return key
        of_rung = [k for k in self.keys if k[0] == key[0]]
        return next((k for k in of_rung if k[1] == OUTPUT), of_rung[0])

    def _ids(self) -> Iterator[tuple[Key, Fact]]:
        for name in _IDS:
            a, b = self.a.facts[name], self.b.facts[name]
            if a != b:
                yield ("ids", "eos"), Fact("eos", f"{name} {a} in A, {b} in B")

    def _numbers(self) -> Iterator[tuple[Key, Fact]]:
        a, b = self.a.facts, self.b.facts
        for module in sorted(a["eps"].keys() & b["eps"].keys()):
            if a["eps"][module] != b["eps"][module]:
                yield _step_of_module(module), Fact("eps", f"{a['eps'][module]:g} in A, {b['eps'][module]:g} in B")
        for text in differences(a["rope"], b["rope"]):
            yield (ROPE, "cos"), Fact("rope", text)
        for i, (x, y) in enumerate(zip(a["attention_scale"], b["attention_scale"], strict=False)):
            if x != y:
                yield (f"layer {i}", ATTENTION), Fact("attention scale", f"{x:g} in A, {y:g} in B")
        for key, rung in (("tie_word_embeddings", (LOGITS, LOGITS)), ("hidden_act", ("layer 0", "mlp.down_proj"))):
            if a["model"][key] != b["model"][key]:
                yield rung, Fact("wrong weight", f"{key} {a['model'][key]} in A, {b['model'][key]} in B")
        if a["temperature"] != b["temperature"]:
            text = f"{a['temperature']} in A, {b['temperature']} in B"
            yield ("logprobs", "logprobs"), Fact("temperature", text)

    def _weights(self) -> Iterator[tuple[Key, Fact]]:
        a, b = self.a.meta["parameters"], self.b.meta["parameters"]
        for name in sorted(a.keys() | b.keys()):
            module, _, leaf = name.rpartition(".")
            step = _step_of_module(module.removeprefix("model."))
            if name not in a or name not in b:
                bias = "dropped bias" if leaf == "bias" else "wrong weight"
                yield step, Fact(bias, f"{name} is not in {'B' if name in a else 'A'}")
            elif (how := relation(a[name], b[name])) and not how.startswith("slightly"):
                yield step, Fact(_kind(leaf, how), f"{name}: {how}")


def _kind(leaf: str, how: str) -> str:
    if leaf == "bias" and how.startswith("all zero"):
        return "dropped bias"
    return "transposed weight" if how.startswith("transposed") else "wrong weight"


def _step_of_module(module: str) -> Key:
    """`layers.3.self_attn.q_proj` is step (layer 3, self_attn.q_proj)."""
    words = module.split(".")
    if words[0] == "layers":
        return f"layer {words[1]}", ".".join(words[2:])
    return {"embed_tokens": (EMBEDDING, "embed_tokens"), "norm": (FINAL_NORM, "norm")}.get(module, (LOGITS, LOGITS))


def _common(a: Tensor, b: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Places of the values that both ascending lists have."""
    _, mine, its = np.intersect1d(a.numpy(), b.numpy(), return_indices=True)
    return mine, its
