"""`data.train` and `data.eval` -> prompts, whatever they are: raw rows, output of `covey preprocess`, or bin/idx pairs.

Preprocessed data keeps the template, stop words and tokenizer it was made with; they are compared with the run's, so
that a run cannot sample with other ends of answers than the prompts were made for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from covey.config.schema import DataConfig
from covey.data.indexed_dataset import IndexedDataset, document_path, keys_at
from covey.data.manifest import SUFFIX, data_file, find_manifest, read_manifest, tokenizer_identity
from covey.data.output import MARK
from covey.data.prompts import PromptSet, build_prompts
from covey.data.readers import BATCH_ROWS
from covey.data.rendering import Renderer
from covey.data.rows import load_rows
from covey.data.templates import CONTENT, TEMPLATES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def load_prompts(
    source: str | list[str], tokenizer: PreTrainedTokenizerBase, config: DataConfig, *, limit: int | None = None
) -> PromptSet:
    """Prompts of a source; `limit` takes the first so many rows.

    Raises ValueError with the fix: everything of build_prompts, and for preprocessed data another tokenizer or template
    than the run's, or files that an interrupted run left.
    """
    sources = [source] if isinstance(source, str) else source
    made = [one for one in sources if is_preprocessed(one)]
    if not made:
        name = ", ".join(sources)
        return build_prompts(load_rows(source, limit=limit), tokenizer, config, source=name)
    if len(made) < len(sources):
        other = next(one for one in sources if one not in made)
        raise ValueError(f"data.train: {made[0]} is preprocessed and {other} is not. Preprocess all, or none")
    sets = [_load_made(one, tokenizer, config) for one in sources]
    prompts = _join(sets)
    prompts = _within_limit(prompts if limit is None else prompts.select(np.arange(min(limit, len(prompts)))), config)
    if len(prompts) == 0:
        raise ValueError(
            f"{prompts.source}: no prompt of at most {config.max_prompt_length} tokens (data.max_prompt_length)"
        )
    return prompts


def is_preprocessed(source: str) -> bool:
    """Whether a source is output of `covey preprocess` or an indexed dataset. Raises ValueError for half of one."""
    if find_manifest(source) is not None or "input_ids" in keys_at(source):
        return True
    path = Path(source)
    if path.suffix == ".parquet" and path.is_file():
        metadata = parquet.read_schema(path).metadata or {}
        if MARK.items() <= metadata.items():
            raise ValueError(
                f"{source}: its manifest {path.stem}{SUFFIX} is not beside it. "
                "Copy it too, or run covey preprocess again"
            )
    return False


def _load_made(source: str, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> PromptSet:
    set_keys = config.model_fields_set & {"system", "chat_template_options", "prompt_key", "response_key"}
    if set_keys:
        logger.warning(
            "%s is preprocessed: %s no effect", source, ", ".join(f"data.{key}" for key in sorted(set_keys)) + " has"
        )
    manifest_path = find_manifest(source)
    if manifest_path is None:
        return _load_indexed(source, tokenizer, config)
    manifest = read_manifest(manifest_path)
    path = data_file(manifest_path, manifest)
    report, made_with, now = manifest["report"], manifest["tokenizer"], tokenizer_identity(tokenizer)
    if made_with["hash"] != now["hash"]:
        raise ValueError(
            f"{source}: preprocessed with another tokenizer ({manifest['config']['tokenizer_name_or_path']}) than the "
            "run's: its ids mean other text here. Preprocess with the model's tokenizer"
        )
    if config.prompt_type not in ("auto", report["prompt_type"]):
        raise ValueError(
            f"data.prompt_type={config.prompt_type}, but {source} was preprocessed with {report['prompt_type']}. "
            "Remove data.prompt_type, or preprocess again"
        )
    stop_token_ids = list(report["stop_token_ids"])
    if made_with["eos_token_id"] != now["eos_token_id"]:
        logger.warning(
            "%s: preprocessed with eos %s (%s), the run's tokenizer has %s (%s); both end a response",
            source, made_with["eos_token"], made_with["eos_token_id"], now["eos_token"], now["eos_token_id"],
        )  # fmt: skip
        stop_token_ids += [made_with["eos_token_id"]] if made_with["eos_token_id"] is not None else []
    return PromptSet(
        table=parquet.read_table(path, memory_map=True),
        source=source,
        prompt_type=report["prompt_type"],
        stop_words=tuple(report["stop_words"]),
        stop_token_ids=stop_token_ids,
        drops=report["drops"],
        num_rows_read=report["rows_in"],
    )


def _load_indexed(prefix: str, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> PromptSet:
    """bin/idx pairs: `response`, else `labels` (MindSpeed-RL) is the reference answer; columns become text again."""
    columns = {key: IndexedDataset(document_path(prefix, key)) for key in keys_at(prefix) if key != "attention_mask"}
    counts = {key: len(column) for key, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"{prefix}: its files have different numbers of rows: {counts}. Preprocess the data again")
    if counts["input_ids"] == 0:
        raise ValueError(f"{prefix}: no rows. Preprocess the data again")
    tables = list(_decoded(prefix, columns, tokenizer))
    name = config.prompt_type
    if name == "auto":
        name = _template_of(tables[0]["prompt_text"][0].as_py()) or "empty"
        logger.warning("%s does not say which template made it; its first prompt looks like: %s", prefix, name)
    renderer = Renderer(tokenizer, name)
    return PromptSet(
        table=pa.concat_tables(tables),
        source=prefix,
        prompt_type=name,
        stop_words=renderer.stop_words,
        stop_token_ids=renderer.stop_token_ids,
        num_rows_read=counts["input_ids"],
    )


def _decoded(prefix: str, columns: dict[str, IndexedDataset], tokenizer: PreTrainedTokenizerBase) -> Iterator[pa.Table]:
    for start in range(0, len(columns["input_ids"]), BATCH_ROWS):
        end = min(start + BATCH_ROWS, len(columns["input_ids"]))
        ids = {key: [column[i].tolist() for i in range(start, end)] for key, column in columns.items()}
        largest = max((token for row in ids["input_ids"] for token in row), default=0)
        if largest >= len(tokenizer):
            raise ValueError(
                f"{prefix}: token {largest} is outside the tokenizer's {len(tokenizer)}: made with another tokenizer"
            )
        texts: dict[str, Any] = {
            key: tokenizer.batch_decode(rows, skip_special_tokens=True) for key, rows in ids.items()
        }
        texts["prompt"] = texts.pop("input_ids")
        texts.setdefault("response", texts.get("labels", [None] * (end - start)))
        texts["prompt_text"] = tokenizer.batch_decode(ids["input_ids"])
        table = pa.table({key: pa.array(values, type=pa.string()) for key, values in texts.items()})
        yield table.append_column("input_ids", pa.array(ids["input_ids"], type=pa.list_(pa.int32())))


def _template_of(text: str) -> str | None:
    """The first template with stop words whose question ends as this prompt does."""
    for template in TEMPLATES.values():
        tail = str(template.user[-1]).rpartition(CONTENT)[2]
        if template.stop_words and tail and text.endswith(tail):
            return template.name
    return None


def _join(sets: list[PromptSet]) -> PromptSet:
    first = sets[0]
    for other in sets[1:]:
        if other.stop_token_ids != first.stop_token_ids:
            raise ValueError(
                f"{first.source} ({first.prompt_type}) and {other.source} ({other.prompt_type}) end answers "
                "differently. Preprocess them with one template"
            )
    if len(sets) == 1:
        return first
    drops: dict[str, int] = {}
    for one in sets:
        for reason, count in one.drops.items():
            drops[reason] = drops.get(reason, 0) + count
    return replace(
        first,
        table=pa.concat_tables([one.table for one in sets], promote_options="permissive"),
        source=", ".join(one.source for one in sets),
        drops=drops,
        num_rows_read=sum(one.num_rows_read for one in sets),
    )


def _within_limit(prompts: PromptSet, config: DataConfig) -> PromptSet:
    """Without prompts over max_prompt_length, which are counted, or an error when overlong_prompts says so."""
    lengths = prompts.lengths
    over = np.flatnonzero(lengths > config.max_prompt_length)
    if not len(over):
        return prompts
    if config.overlong_prompts == "error":
        raise ValueError(
            f"{prompts.source}, row {over[0] + 1}: the prompt has {lengths[over[0]]} tokens, data.max_prompt_length is "
            f"{config.max_prompt_length}. Raise it, or set data.overlong_prompts: drop"
        )
    logger.warning("%s: %d prompts over data.max_prompt_length left out", prompts.source, len(over))
    kept = prompts.select(np.flatnonzero(lengths <= config.max_prompt_length))
    return replace(kept, drops={**prompts.drops, "too_long": prompts.drops.get("too_long", 0) + len(over)})
