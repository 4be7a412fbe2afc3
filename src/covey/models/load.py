"""Hugging Face checkpoints in and out, and the checks that a checkpoint, its tokenizer and our attention agree.

A model is used through two of its parts: `model.base_model` (hidden states, with the `covey` attention) and the output
head's weight. What the packed attention cannot honour is refused by name; a family that is not in FAMILIES must also
pass a numeric self-test against the model's own attention before it is trusted.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from covey.config.mindspeed_model import checkpoint_kind
from covey.models.attention import ATTENTION, PackedPlan
from covey.models.fused import choose_kernels
from covey.models.weight_files import WeightFiles, without_memory
from covey.tokenizer import read_tokenizer
from covey.types import Segment

log = logging.getLogger(__name__)

FAMILIES = ("qwen2", "qwen3", "llama")


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    compute_dtype: torch.dtype | None = None,
    reference_kernels: bool = False,
    trust_remote_code: bool = False,
    fill_later: bool = False,
) -> PreTrainedModel:
    """The causal language model at `path`, on the device, attending through `covey`; ValueError says why not.

    fill_later: without memory for its weights, which `covey.parallel` reads piece by piece once it has sharded the
    model; where that is not possible (see `_build_empty`), the model is loaded whole after all, and the log says so.

    compute_dtype: of activations, where weights are kept in another. What runs its operations is then in
    `kernels_of(model)`; with reference_kernels, plain torch.
    """
    _require_checkpoint(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        _refuse_unsupported(config, path)
        model: Any = _build_empty(path, config, dtype, trust_remote_code) if fill_later else None
        if model is None:
            model = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation="sdpa"
            )
            model.to(device)
            model.tie_weights()  # on devices outside torch's core, `to` makes two parameters of a tied one
    except (OSError, KeyError) as error:
        raise ValueError(f"model.path: cannot load {path!r}: {_first_line(error)}") from error
    prepare_model(model, path)
    model.covey_kernels = choose_kernels(
        model, device=device, dtype=compute_dtype or dtype, reference=reference_kernels
    )
    return model


def kernels_of(model: Any) -> dict[str, str]:
    """What runs the operations of a model from load_model: operation -> kernel."""
    return model.covey_kernels


def load_skeleton(path: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model at `path` without its weights, on the meta device, from config.json; ValueError as load_model.

    Not checked, because it needs weights: the self-test of a family that is not in FAMILIES.
    """
    _require_checkpoint(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        _refuse_unsupported(config, path)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"model.path: cannot build {path!r}: {_first_line(error)}") from error
    _refuse_head_bias(model, path)
    with suppress(OSError):  # a model without generation_config.json
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def _build_empty(path: str, config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """The model without memory for its weights, and where they are; None, with a warning, where it must be loaded."""
    files = WeightFiles.of(path)
    reason = ""
    if config.model_type not in FAMILIES:
        reason = f"the self-test of model_type {config.model_type!r} needs weights"
    elif files is None:
        reason = "its weights are not stored as safetensors"
    else:
        with without_memory():
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code, attn_implementation="sdpa"
            )
        if not (absent := files.lacks(name for name, _ in model.named_parameters())):
            with suppress(OSError):  # a model without generation_config.json
                model.generation_config = GenerationConfig.from_pretrained(path)
            model.covey_weight_files = files
            return model.eval()
        reason = f"no file has {absent[0]}: transformers renames weights while it loads"
    log.warning("%s: every process loads the whole model into host memory, because %s", path, reason)
    return None


def prepare_model(model: PreTrainedModel, path: str = "the model") -> None:
    """Switch a loaded model to the packed attention, after the checks that it can run there."""
    _refuse_unsupported(model.config, path)
    _refuse_head_bias(model, path)
    if model.config.model_type not in FAMILIES:
        _self_test(model, path)
    model.set_attn_implementation(ATTENTION)


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`, which tokenises as its tokenizer.json says; ValueError when there is none."""
    _require_checkpoint(path)
    try:
        return read_tokenizer(path, trust_remote_code=trust_remote_code)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"model.tokenizer: cannot load a tokenizer from {path!r}: {_first_line(error)}; "
            "point model.tokenizer at a directory with tokenizer.json"
        ) from error


def stop_ids(model: Any, tokenizer: Any, *, extra: Iterable[int] = ()) -> list[int]:
    """Sorted ids that end a response: generation_config's eos, the tokenizer's eos, and `extra` (template, settings).

    ValueError when the set is empty or an id is outside the vocabulary.
    """
    found: set[int] = set(extra)
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if configured is not None:
        found.update([configured] if isinstance(configured, int) else configured)
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    vocab_size = model.config.vocab_size
    outside = sorted(i for i in found if not 0 <= i < vocab_size)
    if outside:
        raise ValueError(
            f"stop ids {outside} are outside the model's vocabulary of {vocab_size}: "
            "check rollout.stop_token_ids and that the tokenizer belongs to the model"
        )
    if not found:
        raise ValueError(
            "no token ends a response: the tokenizer has no eos_token and generation_config.json no eos_token_id; "
            "add one of them, or set rollout.stop_token_ids"
        )
    return sorted(found)


def check_vocabulary(model: Any, tokenizer: Any) -> None:
    """ValueError when the tokenizer can produce ids that the model has no embedding for."""
    vocab_size = model.config.vocab_size
    largest = max(len(tokenizer), max(tokenizer.get_vocab().values(), default=-1) + 1)
    if largest > vocab_size:
        raise ValueError(
            f"the tokenizer has ids up to {largest - 1}, but the model's vocabulary ends at {vocab_size - 1}: "
            "model.tokenizer does not belong to model.path (or the embeddings were not resized after adding tokens)"
        )


def head_weight(model: Any) -> Tensor:
    """The output head's weight, (V, D)."""
    return model.get_output_embeddings().weight


def export_model(
    model: PreTrainedModel,
    tokenizer: Any,
    directory: Path,
    *,
    weights: dict[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write weights, config and tokenizer as `transformers` reads them, in place of `directory`.

    weights: instead of the model's own, which may be a part; all of type `dtype`, which the config then names.
    """
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary, state_dict=weights)
    if dtype is not None:
        config = AutoConfig.from_pretrained(temporary)
        config.dtype = dtype
        config.save_pretrained(temporary)
    if tokenizer is not None:
        tokenizer.save_pretrained(temporary)
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(temporary, directory)


def _require_checkpoint(path: str) -> None:
    """A local-looking path must exist and be a Hugging Face directory."""
    local = Path(path)
    if local.is_dir():
        if checkpoint_kind(local) == "megatron":
            raise ValueError(
                f"model.path: {path!r} is a Megatron-core checkpoint; point model.path at the Hugging Face directory "
                "it was made from (config.json and *.safetensors), Covey needs no conversion"
            )
        if not any((local / name).exists() for name in ("config.json", "tokenizer_config.json", "tokenizer.json")):
            raise ValueError(f"model.path: directory {path!r} has no config.json: it is not a Hugging Face checkpoint")
        return
    if local.exists():
        raise ValueError(f"model.path: {path!r} is a file; give the directory that holds config.json")
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        siblings = [p.name for p in local.parent.iterdir()] if local.parent.is_dir() else []
        near = get_close_matches(local.name, siblings, n=1)
        hint = f"; did you mean {str(local.parent / near[0])!r}?" if near else ""
        raise ValueError(f"model.path: no such directory: {path!r}{hint}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _refuse_head_bias(model: Any, path: str) -> None:
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(
            f"model.path: {path}: its output head has a bias, which the chunked log-probabilities do not add"
        )


def _refuse_unsupported(config: Any, path: str) -> None:
    reasons = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder model")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) or getattr(
        config, "use_sliding_window", False
    ):
        reasons.append(f"its sliding window ({getattr(config, 'sliding_window', None)} tokens) is active")
    if getattr(config, "attn_logit_softcapping", None) or getattr(config, "final_logit_softcapping", None):
        reasons.append("it caps logits (softcapping)")
    if getattr(config, "attention_dropout", 0.0):
        reasons.append(f"attention_dropout is {config.attention_dropout}; set it to 0.0 in config.json")
    if getattr(config, "model_type", "") == "gpt_oss":
        reasons.append("it has attention sinks")
    if reasons:
        raise ValueError(f"model.path: {path}: the packed attention cannot serve this model: {'; '.join(reasons)}")


@torch.no_grad()
def _self_test(model: PreTrainedModel, path: str, tolerance: float = 1e-2) -> None:
    """Packed logits of two responses must equal the model's own on the two sequences, relative to the logits' size."""
    device = head_weight(model).device
    ids = torch.arange(1, 13, device=device) % model.config.vocab_size
    prompt, answers = ids[:5], (ids[5:9], ids[9:12])
    training = model.training
    model.eval()
    expected = torch.cat([model(torch.cat([prompt, a])[None], use_cache=False).logits[0, 4:] for a in answers]).float()
    model.set_attn_implementation(ATTENTION)
    segments = [Segment(0, 5, None), Segment(5, 9, 0), Segment(9, 12, 0)]
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 7], device=device)
    hidden = model.base_model(
        input_ids=ids[None], position_ids=positions[None], plan=PackedPlan(segments, device), use_cache=False
    ).last_hidden_state[0]
    model.train(training)
    rows = torch.tensor([4, 5, 6, 7, 8, 4, 9, 10, 11], device=device)
    actual = (hidden[rows] @ head_weight(model).t()).float()
    if actual.shape != expected.shape or not (actual - expected).abs().max() <= tolerance * expected.abs().max():
        raise ValueError(
            f"model.path: {path}: architecture {json.dumps(model.config.model_type)} gives other logits when packed "
            "than by itself, so it is not trained (known to work: " + ", ".join(FAMILIES) + ")"
        )
