"""LoRA in other programs' files: MindSpeed-RL, verl, TRL. All three take the model without adapter as the reference."""

from __future__ import annotations

from typing import Any

from covey.config.rules import Conversion, Finding, KeyMap, Rule, no_effect, number, unsupported

# Megatron-core's layers; each is one or more of Hugging Face's.
_MEGATRON_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
_PEFTS_DEFAULT = ["q_proj", "v_proj"]  # what peft adapts in Llama and Qwen models when nothing is named
_EVERY_LAYER = "all-linear"


def _mindspeed_is_on(run: Conversion) -> bool:
    """Upstream's own test: whether it names modules; lora_r has a default and switches nothing on."""
    return bool(run.get("megatron_training", "lora_target_modules"))


def mindspeed_targets(value: Any, run: Conversion) -> Finding:
    """Which layers, by their Megatron-core names; this key switches LoRA on."""
    names = [value] if isinstance(value, str) else list(value)
    if not names:
        return Finding("no effect", "switched off")
    unknown = [name for name in names if name not in _MEGATRON_LAYERS]
    if unknown:
        return Finding("not supported", f"{unknown}: known: {', '.join(_MEGATRON_LAYERS)}", blocking=True)
    targets = [layer for name in names for layer in _MEGATRON_LAYERS[name]]
    run.set("lora.target_modules", targets)
    for key, native, default in (("lora_r", "rank", 8), ("lora_alpha", "alpha", 16)):
        run.set(f"lora.{native}", int(number(run.get("megatron_training", key) or default)))
    why = "a fused layer has one A for its parts upstream, here one for each" if len(targets) > len(names) else ""
    return Finding("mapped", f"lora.target_modules = {targets}{'; ' + why if why else ''}")


def mindspeed_size(native_key: str) -> Rule:
    """Rank or alpha, which mindspeed_targets sets."""
    return lambda value, run: (
        Finding("honoured", native_key)
        if _mindspeed_is_on(run)
        else Finding("no effect", "LoRA is off: lora_target_modules is not given")
    )


def mindspeed_share_backbone(value: Any, run: Conversion) -> Finding:
    """Upstream's switch for the reference that LoRA gives without a copy."""
    if not _mindspeed_is_on(run):
        return Finding("no effect", "belongs to LoRA")
    if value:
        return Finding("honoured", "the reference is the model without the adapter: no second copy")
    return Finding("mapped", "the reference is the model without the adapter all the same: equal numbers, no copy")


def verl_is_on(run: Conversion) -> bool:
    """Whether a verl file asks for LoRA."""
    return number(run.get("verl", "actor_rollout_ref.model.lora_rank") or 0) > 0


def _verl_rank(value: Any, run: Conversion) -> Finding:
    """The rank, which switches LoRA on."""
    if number(value) <= 0:
        return Finding("no effect", "switched off")
    run.set("lora.rank", int(number(value)))
    run.set("lora.alpha", int(number(run.get("verl", "actor_rollout_ref.model.lora_alpha") or 16)))
    return Finding("honoured", "lora.rank and lora.alpha; the reference is the model without the adapter")


def _verl_targets(value: Any, run: Conversion) -> Finding:
    """Which layers."""
    if not verl_is_on(run):
        return Finding("no effect", "LoRA is off: lora_rank is 0")
    return _targets(value, run)


def _verl_path(value: Any, run: Conversion) -> Finding:
    """An adapter to start from."""
    if value in (None, "null", ""):
        return Finding("no effect", "switched off")
    run.set("lora.path", value)
    return Finding("honoured", "lora.path; its own rank, alpha and modules must be the file's, where it gives them")


def _trl_switch(value: Any, run: Conversion) -> Finding:
    """TRL's ModelConfig.use_peft."""
    if not value:
        return Finding("no effect", "switched off")
    given = run.values["trl"]
    run.set("lora.rank", int(number(given.get("lora_r", 16))))
    run.set("lora.alpha", int(number(given.get("lora_alpha", 32))))
    targets = _targets(given.get("lora_target_modules") or _PEFTS_DEFAULT, run)
    return Finding("honoured", f"lora.rank, lora.alpha, {targets.reason}")


def _trl_dropout(value: Any, run: Conversion) -> Finding:
    """Dropout of the adapter's input."""
    if not run.values["trl"].get("use_peft") or number(value) == 0:
        return Finding("no effect", "switched off")
    return Finding("not supported", "trained without dropout, so that sampling and training agree", differs=True)


def _targets(value: Any, run: Conversion) -> Finding:
    names = [value] if isinstance(value, str) else list(value)
    if names == [_EVERY_LAYER]:
        return Finding("honoured", "lora.target_modules: every linear layer of the decoder, which is the default")
    run.set("lora.target_modules", names)
    return Finding("honoured", f"lora.target_modules {names}")


VERL_LORA: KeyMap = {
    "actor_rollout_ref.model.lora_rank": _verl_rank,
    "actor_rollout_ref.model.lora_alpha": no_effect("read with lora_rank"),
    "actor_rollout_ref.model.target_modules": _verl_targets,
    "actor_rollout_ref.model.exclude_modules": unsupported("name those that get an adapter in target_modules"),
    "actor_rollout_ref.model.lora_adapter_path": _verl_path,
}
_OTHER_KINDS = ("lora_target_parameters", "lora_modules_to_save", "use_rslora", "use_dora")
_QUANTISED = ("load_in_8bit", "load_in_4bit")
TRL_LORA: KeyMap = {
    "use_peft": _trl_switch,
    **{key: no_effect("read with use_peft") for key in ("lora_r", "lora_alpha", "lora_target_modules")},
    "lora_dropout": _trl_dropout,
    "lora_task_type": no_effect("always a causal language model"),
    **{key: unsupported("plain LoRA on linear layers", off=(None, [], False)) for key in _OTHER_KINDS},
    **{key: unsupported("weights are not quantised: more memory, other numbers") for key in _QUANTISED},
}
