"""Keys of `covey preprocess`: MindSpeed-RL's dataset YAML with the same names and meanings.

Dashes equal underscores. Keys of MindSpeed-RL that have nothing to do here are accepted with a warning that says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from covey.config.load import load_tree, validate_tree
from covey.config.schema import PositiveInt, Section
from covey.config.yaml_tree import Tree


class PreprocessConfig(Section):
    """What to read, how to ask it, where to write it."""

    input: str | list[str]
    """File, directory or hub id (json, jsonl, parquet, csv, arrow), or several of them."""
    output_prefix: str
    """Writes PREFIX.parquet and PREFIX.manifest.json; the parent directory must exist."""
    tokenizer_name_or_path: str
    """Directory or hub id of the tokenizer: that of the model to train."""
    handler_name: str = "R1AlpacaStyleInstructionHandler"
    """Shape of the rows: a handler's name, "module:Class" or "file.py:Class"."""
    prompt_type: str = "empty"
    """Prompt template: a name, `empty` = raw text, `chat` = the tokenizer's own, `auto` = chat if it has one."""
    prompt_type_path: str | None = None
    """Templates of your own, in the format of MindSpeed-RL's templates.json; default: the built-in ones."""
    enable_thinking: bool | None = None
    """qwen3 and chat only: let the model think before it answers. qwen3 without it: false."""
    map_keys: dict[str, str | None] | None = None
    """Column of each of prompt, query, response, history, system; "" = absent; default: the handler's."""
    dataset_additional_keys: list[str] = Field(default_factory=list)
    """Columns that must be there. All columns are kept; `labels`, when no column, is the response text."""
    workers: PositiveInt = 1
    """Processes; no more are started than there are cores."""
    seq_length: PositiveInt | None = None
    """Leave out prompts of this many tokens or more; default: keep all."""
    drop_duplicates: bool = False
    """Leave out rows whose prompt came before."""
    seed: int = 1234
    """Seeds the draw of `interleave_probs`."""
    interleave_probs: list[float] | None = None
    """Draw rows of several inputs with these probabilities until one of them ends."""
    format: Literal["parquet", "megatron"] = "parquet"
    """megatron: write PREFIX_packed_KEY_document.bin and .idx too."""
    log_interval: PositiveInt = 10000
    """Rows between lines of progress where there is no progress bar."""
    overwrite_cache: bool = False
    """Write again although the output of the same settings and files is there."""

    @model_validator(mode="after")
    def _one_probability_per_input(self) -> PreprocessConfig:
        if self.interleave_probs is None:
            return self
        count = len(self.input) if isinstance(self.input, list) else 1
        if count < 2 or len(self.interleave_probs) != count:
            raise ValueError(
                f"interleave_probs={self.interleave_probs} for {count} input(s): give one probability for each of "
                "several inputs, as a list"
            )
        if min(self.interleave_probs) <= 0 or not math.isclose(sum(self.interleave_probs), 1, abs_tol=1e-6):
            raise ValueError(f"interleave_probs={self.interleave_probs} must be above 0 and add up to 1")
        return self

    @model_validator(mode="after")
    def _output_directory_exists(self) -> PreprocessConfig:
        parent = Path(self.output_prefix).parent
        if not parent.is_dir():
            raise ValueError(
                f"output_prefix={self.output_prefix}: the directory {parent} does not exist. Make it first"
            )
        return self


_STREAMED = "rows are streamed, in any number"
_ONE_TOKENIZER = "the tokenizer is read as transformers reads it"
_PRETRAINING = "it belongs to pretraining or SFT data; prompts are neither split nor packed"
LEGACY: dict[str, str] = {  # MindSpeed-RL's key -> why nothing is lost by ignoring it
    "tokenizer_type": _ONE_TOKENIZER,
    "tokenizer_not_use_fast": _ONE_TOKENIZER,
    "vocab_file": _ONE_TOKENIZER,
    "merge_file": _ONE_TOKENIZER,
    "make_vocab_size_divisible_by": "the model's vocabulary decides",
    "pad_vocab_size_to": "the model's vocabulary decides",
    "n_subs": _STREAMED,
    "streaming": _STREAMED,
    "cache_dir": _STREAMED + "; HF_HOME decides where hub datasets are kept",
    "json_keys": "every column is kept",
    "split_sentences": _PRETRAINING,
    "keep_newlines": _PRETRAINING,
    "append_eod": _PRETRAINING,
    "pack": _PRETRAINING,
    "neat_pack": _PRETRAINING,
    "dataset_impl": "there is one format of bin and idx files",
    "script_data_dir": "datasets made by a Python script are not run",
    "hf_datasets_params": "give the hub id as `input`, as NAME:CONFIG:SPLIT",
    "merge_group_keys": "give several files as `input`",
    "placeholder_token": "process reward data is not for GRPO",
    "reward_tokens": "process reward data is not for GRPO",
}


def load_settings(path: str | Path, overrides: Sequence[str] = ()) -> tuple[PreprocessConfig, list[str]]:
    """The settings of a YAML file and warnings about keys that do nothing. Raises ConfigError with every problem."""
    tree = load_tree(path, [_underscored(override) for override in overrides])
    warnings: list[str] = []
    if isinstance(tree.data, dict):
        _rename_dashes(tree)
        for key in [key for key in tree.data if key in LEGACY]:
            warnings.append(f"{tree.place((key,))}: {key} has no effect: {LEGACY[key]}")
            del tree.data[key]
        for key in ("input", "interleave_probs"):  # upstream writes lists as text: "0.3,0.7"
            value = tree.data.get(key)
            if isinstance(value, str) and "," in value and not Path(value).exists():
                tree.data[key] = [part.strip() for part in value.split(",")]
    return validate_tree(tree, PreprocessConfig).config, warnings


def _underscored(override: str) -> str:
    key, equals, value = override.partition("=")
    return key.replace("-", "_") + equals + value


def _rename_dashes(tree: Tree) -> None:
    tree.data = {key.replace("-", "_") if isinstance(key, str) else key: value for key, value in tree.data.items()}
    for places in (tree.places, tree.texts):
        for path in [path for path in places if path and isinstance(path[0], str) and "-" in path[0]]:
            places[(str(path[0]).replace("-", "_"), *path[1:])] = places.pop(path)
