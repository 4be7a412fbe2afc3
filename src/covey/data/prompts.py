"""Rows -> prompts ready for the model: rendered once, too long and empty ones dropped and counted, columns kept.

A prompt set is an Arrow table with the raw columns and four of ours: `prompt` (the question as text), `response` (the
reference answer as text), `prompt_text` (what the model reads) and `input_ids`. `covey preprocess` writes the same
table to disk. A raw column of one of these names that holds something else is kept as `raw_NAME`.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from covey.config.schema import DataConfig
from covey.data.handlers import AlpacaStyleInstructionHandler, ChatTemplateHandler, Conversation
from covey.data.readers import BATCH_ROWS
from covey.data.rendering import Renderer, encode_texts
from covey.data.rows import Rows, require_column
from covey.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

OWN_COLUMNS = ("prompt", "response", "prompt_text", "input_ids")


@dataclass(frozen=True)
class PromptSet:
    """Prompts in a fixed order. prompts[3] is a Prompt whose uid is 3, its place in the set."""

    table: pa.Table  # raw columns and OWN_COLUMNS
    source: str
    prompt_type: str  # the template that was applied, never "auto"
    stop_words: tuple[str, ...] = ()  # end an answer besides the tokenizer's eos
    stop_token_ids: list[int] = field(default_factory=list)  # the same as ids
    drops: dict[str, int] = field(default_factory=dict)  # reason -> rows left out: empty_prompt, too_long, ...
    num_rows_read: int = 0

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, index: int) -> Prompt:
        row: dict[str, Any] = self.table.slice(index, 1).to_pylist()[0]
        return Prompt(uid=index, input_ids=row.pop("input_ids"), text=row.pop("prompt_text"), row=row)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """Prompt lengths in tokens, (P,)."""
        return np.concatenate([np.diff(chunk.offsets) for chunk in self.table["input_ids"].chunks] or [np.arange(0)])

    @property
    def fingerprint(self) -> str:
        """Hash of the ids in order: the same prompts in the same order give the same text."""
        digest = hashlib.sha256(self.lengths.astype(np.int64).tobytes())
        for chunk in self.table["input_ids"].chunks:
            digest.update(chunk.flatten().to_numpy().astype(np.int32).tobytes())
        return digest.hexdigest()[:16]

    def select(self, indices: np.ndarray) -> PromptSet:
        """The prompts at `indices`, in that order."""
        return replace(self, table=self.table.take(pa.array(indices, type=pa.int64())))


def build_prompts(rows: Rows, tokenizer: PreTrainedTokenizerBase, config: DataConfig, *, source: str) -> PromptSet:
    """Prompts of raw rows by the keys of `data`. Drops are counted and logged.

    Raises ValueError with the fix: missing column, no chat template, unknown template, nothing left, a prompt over
    max_prompt_length when overlong_prompts is "error".
    """
    require_column(rows.columns, config.prompt_key, key="data.prompt_key", source=source)
    if config.response_key is not None:
        require_column(rows.columns, config.response_key, key="data.response_key (null: no reference)", source=source)
    renderer = Renderer(tokenizer, config.prompt_type, system=config.system, options=config.chat_template_options)
    map_keys: dict[str, str | None] = {"prompt": config.prompt_key, "response": config.response_key}
    handler = ChatTemplateHandler(map_keys, tokenizer, renderer)
    tables: list[pa.Table] = []
    drops: Counter[str] = Counter()
    for start in range(0, len(rows), BATCH_ROWS):
        prepared = prepare_table(
            rows.table.slice(start, BATCH_ROWS),
            handler,
            max_length=config.max_prompt_length,
            where=f"{source}, row {{}}",
            first_row=start,
            overlong_is_error=config.overlong_prompts == "error",
        )
        tables.append(prepared.table)
        drops.update(prepared.drops)
    table = pa.concat_tables(tables, promote_options="permissive")
    if table.num_rows == 0:
        raise ValueError(
            f"{source}: none of its {len(rows)} rows is left ({_spell(drops)}). Raise data.max_prompt_length?"
        )
    if drops:
        logger.warning("%s: %d of %d rows left out: %s", source, sum(drops.values()), len(rows), _spell(drops))
    return PromptSet(
        table=table,
        source=source,
        prompt_type=renderer.prompt_type,
        stop_words=renderer.stop_words,
        stop_token_ids=renderer.stop_token_ids,
        drops=dict(drops),
        num_rows_read=len(rows),
    )


def split_prompts(prompts: PromptSet, eval_rows: int) -> tuple[PromptSet, PromptSet]:
    """(training prompts, the last `eval_rows` held out). A training row that asks the same text as a held-out one is
    left out and counted as `also_held_out`, so that the two never share a prompt."""
    if eval_rows == 0:
        return prompts, prompts.select(np.arange(0))
    if eval_rows >= len(prompts):
        raise ValueError(f"data.eval_rows={eval_rows} leaves no training rows of {len(prompts)}. Hold out fewer")
    cut = len(prompts) - eval_rows
    held_out = prompts.select(np.arange(cut, len(prompts)))
    shared = _asked_in(prompts.table["prompt_text"], held_out)[:cut]
    training = prompts.select(np.flatnonzero(~shared))
    if len(training) == 0:
        raise ValueError(f"{prompts.source}: every training prompt is also one of the {eval_rows} held-out rows")
    if shared.any():
        logger.warning("%s: %d training rows ask what a held-out row asks; left out", prompts.source, shared.sum())
        training = replace(training, drops={**training.drops, "also_held_out": int(shared.sum())})
    return training, held_out


def count_shared(training: PromptSet, held_out: PromptSet) -> int:
    """Training rows whose rendered prompt is also in `held_out`: above 0, held-out scores flatter."""
    return int(_asked_in(training.table["prompt_text"], held_out).sum())


@dataclass(frozen=True)
class Prepared:
    """Some rows after a handler and a template."""

    table: pa.Table  # raw columns and OWN_COLUMNS of the rows that are kept
    drops: dict[str, int]  # reason -> rows
    response_lengths: np.ndarray  # (rows,) tokens of the reference answers, -1 where there is none or not counted


def prepare_table(
    raw: pa.Table,
    handler: AlpacaStyleInstructionHandler,
    *,
    max_length: int | None,
    where: str = "row {}",
    first_row: int = 0,
    overlong_is_error: bool = False,
    default_labels: bool = False,
    count_response_tokens: bool = False,
) -> Prepared:
    """Apply handler and template to rows; `where` names a row (counted from 1) in errors.

    default_labels: rows without a `labels` column get the response text as `labels`, as MindSpeed-RL means it.
    """
    examples: list[dict[str, Any]] = raw.to_pylist()
    conversations: list[Conversation] = []
    for i, example in enumerate(examples):
        try:
            conversations.append(handler.conversation(example))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where.format(first_row + i + 1)}: {error}") from error
    asked = [i for i, conversation in enumerate(conversations) if conversation.question.strip()]
    inputs = handler.model_inputs([examples[i] for i in asked], [conversations[i] for i in asked])
    keep: list[int] = []
    kept: list[dict[str, Any]] = []
    drops: Counter[str] = Counter()
    if len(asked) < len(examples):
        drops["empty_prompt"] = len(examples) - len(asked)
    for i, fields in zip(asked, inputs, strict=True):
        if "prompt_text" not in fields:  # a handler that renders by itself
            fields["prompt_text"] = str(handler.tokenizer.decode(fields["input_ids"]))
        length = len(fields["input_ids"])
        if max_length is not None and length > max_length:
            if overlong_is_error:
                raise ValueError(
                    f"{where.format(first_row + i + 1)}: the prompt has {length} tokens, data.max_prompt_length is "
                    f"{max_length}. Raise it, or set data.overlong_prompts: drop"
                )
            drops["too_long"] += 1
            continue
        response = conversations[i].response
        kept.append({"prompt": conversations[i].question, "response": response, **fields})
        keep.append(i)
    table = _join(raw.take(pa.array(keep, type=pa.int64())), kept, handler, default_labels)
    lengths = np.full(len(kept), -1)
    answered = [i for i, fields in enumerate(kept) if fields["response"] is not None]
    if count_response_tokens and answered:
        texts = [kept[i]["response"] for i in answered]
        lengths[answered] = [len(ids) for ids in encode_texts(handler.tokenizer, texts)]
    return Prepared(table, dict(drops), lengths)


def _join(
    raw: pa.Table, kept: list[dict[str, Any]], handler: AlpacaStyleInstructionHandler, default_labels: bool
) -> pa.Table:
    names = [name if name not in OWN_COLUMNS else _kept_name(name, raw, handler) for name in raw.column_names]
    columns: dict[str, Any] = dict(zip(names, raw.columns, strict=True))
    columns.pop("", None)
    types = {
        "prompt": pa.string(),
        "response": pa.string(),
        "prompt_text": pa.string(),
        "input_ids": pa.list_(pa.int32()),
    }
    added = dict.fromkeys([*OWN_COLUMNS, *(name for fields in kept for name in fields)])
    for name in added:
        if name != "attention_mask":  # all ones: lengths say the same
            columns[name] = pa.array([fields.get(name) for fields in kept], type=types.get(name))
    if default_labels and "labels" not in columns:
        columns["labels"] = columns["response"]
    return pa.table(columns)


def _kept_name(name: str, raw: pa.Table, handler: AlpacaStyleInstructionHandler) -> str:
    """The new name of a raw column called like one of ours; '' when ours is the same text."""
    kind = raw.schema.field(name).type
    same = handler.columns.get(name) == name and (pa.types.is_string(kind) or pa.types.is_large_string(kind))
    return "" if same else f"raw_{name}"


def _asked_in(texts: pa.ChunkedArray, other: PromptSet) -> np.ndarray:
    asked = set(other.table["prompt_text"].to_pylist())
    return np.array([text in asked for text in texts.to_pylist()], dtype=bool)


def _spell(drops: Counter[str]) -> str:
    return ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in drops.items()) or "none dropped"
