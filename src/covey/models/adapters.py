"""LoRA through `peft`: small trained matrices beside the frozen linear layers of a causal language model.

A layer W x becomes W x + (alpha / rank) B A x (arXiv:2106.09685 sec. 4.1), with A (rank, D_in) random and B
(D_out, rank) 0 at first. peft exchanges the layers in place, so the model keeps its class, and `q_proj.weight` becomes
`q_proj.base_layer.weight`, `q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`. A rollout runs the same
layers: merging before it would round W + B A to the weights' numbers and sample from another model than is trained.

Left out: dropout, with which the sampled and the trained distribution would differ; adapters of embedding and head,
which are used by their weights alone; peft's other methods (DoRA, quantised or decomposed weights, patterns of ranks).
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from covey.models.architectures import ARCHITECTURES, layers_of

log = logging.getLogger(__name__)

_NAME = "default"  # what peft calls the only adapter of a model
_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."  # of every name in peft's files
_ONLY = {  # settings of an adapter's file of which one value is known here
    "peft_type": "LORA",
    "bias": "none",
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora", "fan_in_fan_out"), False),
    **dict.fromkeys(("modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication")),
    **dict.fromkeys(("alora_invocation_tokens", "velora_config", "kasa_config", "monteclora_config", "arrow_config")),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "use_bdlora", "layers_to_transform", "megatron_config")),
}


def add_adapter(
    model: Any,
    *,
    base: str,
    rank: int | None = None,
    alpha: int | None = None,
    targets: list[str] | None = None,
    path: str | None = None,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> None:
    """Freeze `model` and put an adapter beside its linear layers, in place; a new one, or the one at `path`.

    base: where the model's weights are, for whoever loads the adapter later. rank, alpha, targets: of a new one; with a
    path they may be None, and must otherwise be the stored ones. dtype, device: of the adapter; None: fp32, or as it is
    stored, where the model is. The random A is the same on every device and rank. ValueError says what does not fit.
    """
    peft = _peft()
    layers = _linear_layers(model)
    if path is None:
        targets = targets or default_targets(model)
        _check_targets(targets, layers)
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM")
    else:
        config = _stored_config(path, {"rank": rank, "alpha": alpha, "target_modules": targets}, base)
    config.base_model_name_or_path = base
    adapted = _inject(model, config)
    if not adapted or not adapted <= set(layers):
        wrong = sorted(adapted - set(layers)) or config.target_modules
        raise ValueError(f"lora.path: {path!r} adapts {wrong}, which are no linear layers of the decoder of {base!r}")
    place: torch.device = device or next(model.parameters()).device
    if path is None and place.type == "meta":
        return  # a model without numbers
    weights = _random_weights(model, seed) if path is None else _stored_weights(path, model)
    for name, weight in weights.items():
        _set(model, name, weight.to(place, dtype))


def restore_adapter(model: Any, directory: Path) -> None:
    """Freeze `model` and add the adapter that `save_adapter_config` described there, of zeros in fp32 on the cpu."""
    _inject(model, _peft().PeftConfig.from_pretrained(str(directory)))
    for name, shape in _adapter_shapes(model).items():
        _set(model, name, torch.zeros(shape, device="cpu"))


def base_of_adapter(directory: Path) -> str:
    """The model that an adapter was made for, as its description says."""
    return json.loads((directory / _CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]


def has_adapter(model: Any) -> bool:
    """Whether `add_adapter` was applied to the model."""
    return _NAME in (getattr(model, "peft_config", None) or {})


def is_adapter_weight(name: str) -> bool:
    """Whether a parameter of that name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def is_adapter_directory(path: str) -> bool:
    """Whether peft wrote an adapter there."""
    return (Path(path) / _CONFIG).is_file()


def plain_name(name: str) -> str:
    """The name that a weight has in the model without adapter."""
    return name.replace(".base_layer.", ".")


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Inside, `model` is the model that the adapter was added to."""
    # peft's own switch also changes requires_grad, which sharded parameters must keep.
    adapted = [module for module in model.modules() if hasattr(module, "lora_A")]
    for module in adapted:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in adapted:
            module._disable_adapters = False


def merged_weights(model: Any, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights of `model` (its own or copies, in the order of its state dict) with its adapter added to them.

    Names are those of the model without adapter. W + (alpha / rank) B A is computed in fp32 and rounded once.
    """
    if not has_adapter(model):
        yield from named
        return
    scale = _scale(model.peft_config[_NAME])
    waiting: dict[str, tuple[str, Tensor]] = {}  # of the layer that is being read, by kind
    for name, tensor in named:
        layer, _, kind = name.rpartition(f".{_NAME}.weight")[0].rpartition(".")
        if name.endswith(".base_layer.weight"):
            waiting["weight"] = plain_name(name), tensor
        elif kind == "lora_A":
            waiting[kind] = layer, tensor
        elif kind == "lora_B":
            (weight_name, weight), (_, down) = waiting.pop("weight"), waiting.pop("lora_A")
            assert weight_name == f"{layer}.weight", (weight_name, layer)
            added = tensor.float() @ down.float()
            yield weight_name, torch.add(weight.float(), added, alpha=scale).to(weight.dtype)
        else:
            yield plain_name(name), tensor


def save_adapter(model: Any, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Write an adapter as `peft.PeftModel.from_pretrained` reads it, in place of `directory`.

    weights: of the adapter, whole, by the names they have in the model.
    """
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    save_adapter_config(model, temporary)
    stored = {_stored_name(name): weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(stored, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(temporary, directory)


def save_adapter_config(model: Any, directory: Path) -> None:
    """Write what describes the model's adapter, without its weights; nothing when it has none."""
    if has_adapter(model):
        model.peft_config[_NAME].save_pretrained(directory)


def default_targets(model: Any) -> list[str]:
    """Names of the decoder's linear layers: those of the family's row, or all that there are."""
    row = ARCHITECTURES.get(model.config.model_type)
    if row is None:
        return sorted({name.rpartition(".")[2] for name in _linear_layers(model)})
    return [name.rpartition(".")[2] for name in (*row.column, *row.row)]


def describe_adapter(model: Any) -> str:
    """One line for people."""
    config = model.peft_config[_NAME]
    size = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
    targets = (
        config.target_modules if isinstance(config.target_modules, str) else ", ".join(sorted(config.target_modules))
    )
    return f"rank {config.r}, alpha {config.lora_alpha} on {targets}: {size:,.2f}M parameters are trained"


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError(f"lora needs the package peft ({error}): pip install 'covey[lora]'") from error
    return peft


def _inject(model: Any, config: Any) -> set[str]:
    """Let peft exchange the layers; their names."""
    _peft().inject_adapter_in_model(config, model)
    return {name for name, module in model.named_modules() if hasattr(module, "lora_A")}


def _set(model: Any, name: str, weight: Tensor) -> None:
    """Make `weight` a trained parameter."""
    model.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(weight)


def _linear_layers(model: Any) -> dict[str, nn.Linear]:
    """Every linear layer of the decoder layers by its name in the model."""
    names = {id(module): name for name, module in model.named_modules()}
    return {
        f"{names[id(layer)]}.{name}": module
        for layer in layers_of(model)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }


def _check_targets(targets: list[str], layers: Iterable[str]) -> None:
    known = sorted({name.rpartition(".")[2] for name in layers})
    unknown = [target for target in targets if target not in known]
    if unknown:
        raise ValueError(
            f"lora.target_modules: {unknown} are no linear layers of the model's decoder; known: {', '.join(known)} "
            "(embedding and output head are used by their weights alone and get no adapter)"
        )


def _scale(config: Any) -> float:
    return config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)


def _stored_name(name: str) -> str:
    return _PREFIX + name.replace(f".{_NAME}.", ".")


def _adapter_shapes(model: Any) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters() if is_adapter_weight(name)}


def _random_weights(model: Any, seed: int) -> dict[str, Tensor]:
    """A as torch starts a linear layer (what peft does too), from the seed; B 0."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in _adapter_shapes(model).items():
        weights[name] = torch.zeros(shape)
        if ".lora_A." in name:
            nn.init.kaiming_uniform_(weights[name], math.sqrt(5), generator=generator)
    return weights


def _stored_config(path: str, given: Mapping[str, Any], base: str) -> Any:
    """The description of the adapter at `path`; ValueError when it is of another kind or not as `given`."""
    if (Path(path).exists() or path.startswith((".", "/", "~"))) and not is_adapter_directory(path):
        raise ValueError(f"lora.path: {path!r} has no {_CONFIG}: it is not a directory that peft wrote")
    try:
        config = _peft().PeftConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"lora.path: cannot read the adapter {path!r}: {error}") from error
    other = [f"{k}={getattr(config, k)!r}" for k, v in _ONLY.items() if (getattr(config, k, v) or v) != v]
    if not isinstance(getattr(config, "init_lora_weights", True), bool) and config.init_lora_weights != "gaussian":
        other.append(f"init_lora_weights={config.init_lora_weights!r}")  # some of these change the base model too
    if other:
        raise ValueError(
            f"lora.path: {path!r} is not plain LoRA: {', '.join(other)}; merge it into the model with peft"
        )
    targets = config.target_modules
    stored = {"rank": config.r, "alpha": config.lora_alpha, "target_modules": targets}
    for key, value in given.items():
        same = set(value) == targets if isinstance(value, list) and isinstance(targets, set) else value == stored[key]
        if value is not None and not same:
            raise ValueError(
                f"lora.{key}={value}, but the adapter at lora.path={path!r} has {stored[key]}: remove {key}"
            )
    if config.lora_dropout:
        log.warning("the adapter %s was trained with dropout %g; it goes on without", path, config.lora_dropout)
        config.lora_dropout = 0.0
    if config.base_model_name_or_path not in (None, base):
        log.warning("the adapter %s was made for %s, and is now used on %s", path, config.base_model_name_or_path, base)
    config.inference_mode = False
    return config


def _stored_weights(path: str, model: Any) -> dict[str, Tensor]:
    """The weights of the adapter at `path` by their names in the model; ValueError unless they are just those."""
    stored = _peft().utils.load_peft_weights(path, device="cpu")
    wanted = _adapter_shapes(model)
    names = {_stored_name(name): name for name in wanted}
    missing, unknown = sorted(names.keys() - stored.keys()), sorted(stored.keys() - names.keys())
    shapes = [n for n, name in names.items() if n in stored and stored[n].shape != wanted[name]]
    if missing or unknown or shapes:
        raise ValueError(
            f"lora.path: {path!r} does not fit the model: missing {missing[:3]}, unknown {unknown[:3]}, "
            f"other shapes {shapes[:3]}"
        )
    return {name: stored[stored_name] for stored_name, name in names.items()}
