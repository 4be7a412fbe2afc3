"""Rewards of a sequence-classification model on the training device: the reward named `reward_model`.

It runs in the trainer's process, once per step with all responses, because a reward worker has no device. What it reads
is the prompt and the response, in the reward model's own chat template when its tokenizer has one. Models with one
output (num_labels 1, regression), or one of several outputs, chosen by `label`. Left out: token-level and generative
reward models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from covey.config.schema import RewardConfig
from covey.rewards.base import RewardFn, Score, read_options
from covey.tokenizer import read_tokenizer

NAME = "reward_model"
_OPTIONS = {"path": None, "label": 0, "max_length": 4096, "max_tokens_per_batch": 16384, "sigmoid": False}


@dataclass(frozen=True)
class _Loaded:
    model: Any
    tokenizer: Any


class RewardModel:
    """The reward function. Loads a model when its path is first used, and keeps it."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._loaded: dict[str, _Loaded] = {}

    def __call__(self, responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[Score]:
        """The model's output for each response, in logits.

        Options: `path` (Hugging Face directory or hub id; required), `label` (which output), `sigmoid` (squash to
        [0, 1]), `max_length` (tokens; a longer text is an error, as half of it cannot be judged),
        `max_tokens_per_batch` (padded tokens of one forward; changes memory and speed only).
        """
        options = read_options(config, _OPTIONS)
        loaded = self.load(options)
        ids = [self._encode(loaded.tokenizer, text, row) for text, row in zip(responses, rows, strict=True)]
        longest = max(map(len, ids), default=0)
        if not all(ids):
            raise ValueError("reward_model: prompt and response are empty, so there is nothing to judge")
        if longest > options["max_length"]:
            raise ValueError(f"reward_model: a text of {longest} tokens, over max_length={options['max_length']}")
        scores: list[Score] = [None] * len(ids)
        for batch in batches([len(one) for one in ids], options["max_tokens_per_batch"]):
            logits = self._forward(loaded.model, [ids[i] for i in batch])[:, options["label"]]
            values = torch.sigmoid(logits) if options["sigmoid"] else logits
            for i, value in zip(batch, values.tolist(), strict=True):
                scores[i] = value
        return scores

    def load(self, options: dict[str, Any]) -> _Loaded:
        """The model of `options`; ValueError when it cannot be loaded or has no such output."""
        path = options.get("path")
        if not path:
            raise ValueError(
                "reward_model needs the option path: directory or hub id of a sequence-classification model"
            )
        if path not in self._loaded:
            try:
                model = AutoModelForSequenceClassification.from_pretrained(path, dtype=self._dtype)
                tokenizer = read_tokenizer(path)
            except (OSError, ValueError) as error:
                raise ValueError(f"reward_model: path={path!r} cannot be loaded: {error}") from error
            if not hasattr(model, "score"):
                raise ValueError(
                    f"reward_model: {type(model).__name__} is no decoder with a score head; use a model of the "
                    "...ForSequenceClassification kind on Llama, Qwen, Mistral or the like"
                )
            model.config.pad_token_id = tokenizer.pad_token_id = _pad(tokenizer)
            self._loaded[path] = _Loaded(model.to(self._device).eval().requires_grad_(False), tokenizer)
        num_labels = self._loaded[path].model.config.num_labels
        if not 0 <= options.get("label", 0) < num_labels:
            raise ValueError(
                f"reward_model: label={options['label']} but the model at {path!r} has {num_labels} outputs"
            )
        return self._loaded[path]

    def _encode(self, tokenizer: Any, response: str, row: dict[str, Any]) -> list[int]:
        prompt = row.get("prompt", "")
        if tokenizer.chat_template is None:
            text = prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
            return tokenizer(text + response)["input_ids"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        messages.append({"role": "assistant", "content": response})
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    def _forward(self, model: Any, ids: list[list[int]]) -> Tensor:
        width = max(map(len, ids))
        pad = model.config.pad_token_id
        input_ids = torch.tensor([one + [pad] * (width - len(one)) for one in ids], device=self._device)
        lengths = torch.tensor([len(one) for one in ids], device=self._device)
        mask = torch.arange(width, device=self._device) < lengths[:, None]
        # The head is applied at every position and read at each text's last, as the model's own search for the last
        # token that is not padding fails where a text ends with the padding token.
        hidden = model.get_decoder()(input_ids=input_ids, attention_mask=mask.long()).last_hidden_state
        last = hidden[torch.arange(len(ids), device=self._device), lengths - 1]
        return model.score(last).float()


def local_rewards(config: RewardConfig, device: torch.device, dtype: torch.dtype) -> dict[str, RewardFn]:
    """What the Scorer needs as `local` for this configuration; models are loaded now, so that errors come at start."""
    entries = [*config.functions, *(entry for entries in config.tasks.values() for entry in entries)]
    wanted = [entry for entry in entries if entry.name == NAME]
    if not wanted:
        return {}
    model = RewardModel(device, dtype)
    for entry in wanted:
        model.load(read_options(entry.options, _OPTIONS))
    return {NAME: model}


def batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Indices grouped so that (texts) x (longest) stays within `max_tokens`, similar lengths together; at least one."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and (len(groups[-1]) + 1) * lengths[index] <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _pad(tokenizer: Any) -> int:
    """Any id will do as padding, since masks come from lengths."""
    for one in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if one is not None:
            return int(one)
    return 0
