"""What was run, as facts that a comparison can hold side by side: ids, sizes, eps, rope, scales, back ends, versions.

Read off the loaded model where possible (a norm's eps, an attention's scale), since that is what computes.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

import covey
from covey.config.schema import Config
from covey.models.architectures import layers_of
from covey.models.load import stop_ids
from covey.setup import Parts

_SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "tie_word_embeddings",
    "rms_norm_eps",
)


def facts_of(parts: Parts, config: Config, *, path: str) -> dict[str, Any]:
    """JSON-able facts of a loaded model and its tokenizer."""
    model, tokenizer = parts.policy.model, parts.tokenizer
    settings = model.config.get_text_config()
    generation = getattr(model, "generation_config", None)
    return {
        "tokenizer_eos": tokenizer.eos_token_id,
        "tokenizer_pad": tokenizer.pad_token_id,
        "tokenizer_bos": tokenizer.bos_token_id,
        "tokenizer_size": len(tokenizer),
        "config_eos": settings.eos_token_id,
        "generation_eos": getattr(generation, "eos_token_id", None),
        "stop_ids": stop_ids(model, tokenizer, extra=config.rollout.stop_token_ids),
        "model": {name: getattr(settings, name, None) for name in _SIZES},
        "head_dim": head_dim(settings),
        "rope": getattr(settings, "rope_parameters", None) or {},
        "eps": _eps(model),
        "attention_scale": [getattr(layer.self_attn, "scaling", None) for layer in layers_of(model)],
        "temperature": config.rollout.temperature,
        "path": path,
        "environment": parts.describe()
        | {
            "processes": str(parts.mesh.world),
            "covey": covey.__version__,
            "transformers": transformers.__version__,
            "matmul_precision": torch.get_float32_matmul_precision(),
        },
    }


def settings_of(config: Config) -> dict[str, Any]:
    """The settings that advantages, loss and update depend on."""
    return {
        "algorithm": config.algorithm.model_dump(mode="json"),
        "train": config.train.model_dump(mode="json"),
        "rollout": {"max_response_length": config.rollout.max_response_length},
    }


def differences(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> list[str]:
    """`key: value in A, value in B` for every leaf that differs."""
    found = []
    for key in sorted(a.keys() | b.keys()):
        x, y, name = a.get(key), b.get(key), f"{prefix}{key}"
        if isinstance(x, dict) and isinstance(y, dict):
            found += differences(x, y, f"{name}.")
        elif x != y:
            found.append(f"{name}: {x} in A, {y} in B")
    return found


def head_dim(settings: Any) -> int:
    """H of a text config."""
    return getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads


def _eps(model: Any) -> dict[str, float]:
    """eps of every norm, by the module's name."""
    found = {}
    for name, module in model.base_model.named_modules():
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if isinstance(eps, float):
            found[name] = eps
    return found
