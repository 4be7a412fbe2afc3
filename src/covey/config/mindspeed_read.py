"""Reading a MindSpeed-RL file: hydra defaults, model block, old schema, environment; then every key through its table.

Hydra itself is not needed: `defaults: - model: - NAME` is the file model/NAME.yaml beside the file or in one of the
given directories, a plain `- NAME` is NAME.yaml there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from covey.config.mindspeed import DEFAULTS, GENERATE, RL, SAMPLING, environment_variable
from covey.config.mindspeed_megatron import MEGATRON
from covey.config.mindspeed_model import read_checkpoint
from covey.config.rules import Conversion, Finding, apply_table, judge
from covey.config.yaml_tree import KeyPath, Tree, dotted, read_tree

SECTIONS = ("megatron_training", "actor_config", "rl_config", "generate_config")
_OTHER = ("ref_config", "reward_config", "critic_config", "vit_config")
_TOOLS = ("profiler_config", "msprobe_config")
_OLD_RL_KEYS = ("experience_count", "update_micro_batch_size", "colocate_actor_ref", "colocate_all_models")
_ENVIRONMENT_FILE = "configs/envs/runtime_env.yaml"


def is_mindspeed(data: Any) -> bool:
    """Whether a file's data is a MindSpeed-RL configuration, of any age."""
    return isinstance(data, dict) and any(name in data for name in SECTIONS)


def convert_mindspeed(
    tree: Tree,
    *,
    config_dirs: Sequence[Path] = (),
    overridden: frozenset[str] = frozenset(),
    reward_names: tuple[str, ...] = (),
) -> Conversion:
    """Judge every key of a MindSpeed-RL file; `overridden`: native keys that the command line gives."""
    data = _plain(tree.data, (), tree)
    directories = [Path(tree.source).parent, *config_dirs]
    run = Conversion(
        {},
        DEFAULTS,
        overridden=overridden,
        reward_names=reward_names,
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )
    run.places = {dotted(_plain_path(path)): place for path, place in tree.places.items()}
    model_block = _defaults(data, directories, run)
    rl, generate = _section(data, "rl_config", run), _section(data, "generate_config", run)
    sampling = generate.pop("sampling_config", None) or {}
    training, actor = _section(data, "megatron_training", run), _section(data, "actor_config", run)
    layout = _section(data, "parallel_config", run)
    run.old_schema = any(name in data for name in ("ref_config", "reward_config")) or any(k in rl for k in _OLD_RL_KEYS)
    run.values = {
        "megatron_training": {**training, **actor, **layout},
        "rl_config": rl,
        "generate_config": generate,
        "sampling_config": sampling,
    }
    shadowed = [key for key in training if key in actor and key != "model"]
    for key in shadowed:
        run.note(Finding("no effect", f"actor_config.{key} is given too"), f"megatron_training.{key}", training[key])
    apply_table(MEGATRON, {k: v for k, v in training.items() if k not in shadowed}, "megatron_training.", run)
    apply_table(MEGATRON, actor, "actor_config.", run)
    apply_table(RL, rl, "rl_config.", run)
    apply_table(GENERATE, generate, "generate_config.", run)
    apply_table(SAMPLING, sampling, "generate_config.sampling_config.", run)
    apply_table(MEGATRON, layout, "parallel_config.", run)
    _environment(data, directories, run)
    _other_sections(data, run)
    _absent(run)
    run.checkpoint = read_checkpoint(run.native.get("model.path"))
    for file, block in model_block:
        apply_table(MEGATRON, block, f"{file}.", run)
    return run


def _plain(value: Any, path: KeyPath, tree: Tree) -> Any:
    """Maps with dashes in keys read as underscores."""
    if isinstance(value, dict):
        return {str(key).replace("-", "_"): _plain(item, (*path, key), tree) for key, item in value.items()}
    return value


def _plain_path(path: KeyPath) -> KeyPath:
    return tuple(part.replace("-", "_") if isinstance(part, str) else part for part in path)


def _section(data: dict[str, Any], name: str, run: Conversion) -> dict[str, Any]:
    value = data.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        run.note(Finding("not supported", "a map of keys is expected", blocking=True), name, value)
        return {}
    return dict(value)


def _defaults(data: dict[str, Any], directories: list[Path], run: Conversion) -> list[tuple[str, dict[str, Any]]]:
    """Merge the files that `defaults` names under the data; (name, keys) of the model block that is used."""
    used = [_section(data, name, run).get("model") for name in ("actor_config", "megatron_training")]
    blocks: list[tuple[str, dict[str, Any]]] = []
    entries = data.get("defaults")
    for entry in entries if isinstance(entries, list) else []:
        groups = entry.items() if isinstance(entry, dict) else [("", entry)]
        for group, names in groups:
            for name in names if isinstance(names, list) else [names]:
                if name in (None, "_self_"):
                    continue
                relative = Path(group) / f"{name}.yaml"
                file = next((d / relative for d in directories if (d / relative).is_file()), None)
                key = f"defaults.{group or name}"
                if file is None:
                    where = ", ".join(str(directory) for directory in directories)
                    reason = f"{relative} is not in {where} (--config-dir DIR)"
                    if group == "model":
                        run.note(Finding("no effect", f"{reason}; the checkpoint describes the model"), key, name)
                    else:
                        run.note(Finding("not supported", reason, blocking=True), key, name)
                    continue
                run.note(Finding("honoured", f"read from {file}"), key, name)
                _merge(data, read_tree(file), group, used, blocks, run)
    return blocks


def _merge(
    data: dict[str, Any],
    tree: Tree,
    group: str,
    used: list[Any],
    blocks: list[tuple[str, dict[str, Any]]],
    run: Conversion,
) -> None:
    """A model file holds blocks by name; any other file holds sections that the main file's keys go before."""
    content = _plain(tree.data, (), tree) if isinstance(tree.data, dict) else {}
    if group == "model":
        for name, block in content.items():
            if isinstance(block, dict) and (name in used or not any(used)):
                blocks.append((name, block))
                run.places |= {f"{name}.{key}": tree.place((name, key)) for key in block}
        return
    for name, section in content.items():
        mine = data.get(name)
        data[name] = {**section, **mine} if isinstance(section, dict) and isinstance(mine, dict) else mine or section
    run.places = {dotted(_plain_path(p)): place for p, place in tree.places.items()} | run.places


def _environment(data: dict[str, Any], directories: list[Path], run: Conversion) -> None:
    inline = _section(data, "runtime_env", run)
    for name, value in _variables(inline).items():
        key = f"runtime_env.{name}"
        run.note(environment_variable(name, value, run), key, value)
    given = run.values["rl_config"].get("runtime_env_path")
    candidates = [Path(given or _ENVIRONMENT_FILE)]
    candidates += [root / candidates[0] for directory in directories for root in (directory, *directory.parents[:1])]
    file = next((path for path in candidates if path.is_file()), None)
    if file is None:
        if given:
            reason = f"no such file, here or beside {directories[0]}"
            run.note(Finding("not supported", reason, differs=True), "rl_config.runtime_env_path", given)
        return
    tree = read_tree(file)
    for name, value in _variables(tree.data if isinstance(tree.data, dict) else {}).items():
        if name not in _variables(inline):
            key = f"env_vars.{name}"
            run.places[key] = tree.places.get(("env_vars", name), str(file))
            run.note(environment_variable(name, value, run), key, value)


def _variables(block: dict[str, Any]) -> dict[str, Any]:
    inner = block.get("env_vars")
    return inner if isinstance(inner, dict) else block


def _other_sections(data: dict[str, Any], run: Conversion) -> None:
    known = (*SECTIONS, *_OTHER, *_TOOLS, "defaults", "runtime_env", "parallel_config")
    for name, value in data.items():
        for key, item in value.items() if isinstance(value, dict) and name in _OTHER else ():
            reason = "the critic of PPO" if name == "critic_config" else "shares layout and settings with the policy"
            run.note(Finding("no effect", reason), f"{name}.{key}", item)
        if name in _TOOLS:
            enabled = "true" in str(value).lower()
            reason = "Ascend's profiler and msprobe are not driven by Covey; records of every step are kept"
            run.note(Finding("not supported" if enabled else "no effect", reason, differs=enabled), name)
        elif name not in known:
            run.note(Finding("unknown", f"unknown section; known: {', '.join(known)}", blocking=True), name, value)


def _absent(run: Conversion) -> None:
    """Keys the file does not give: upstream's defaults, where they do no harm."""
    tables = {"megatron_training": MEGATRON, "rl_config": RL, "sampling_config": SAMPLING}
    given = {section: set(keys) for section, keys in run.values.items()}
    skip = set()
    if "algorithm" in given["rl_config"]:
        skip.add("stage")
    if "global_batch_size" not in given["megatron_training"]:
        skip.add("mini_batch_size")
    if "seq_len" in given["megatron_training"]:
        skip |= {"max_prompt_length", "max_tokens", "micro_batch_size"}
    if "clip_param" in given["rl_config"]:
        skip.add("clip_ratio")
    for section, defaults in DEFAULTS.items():
        for key, value in defaults.items():
            if key not in given[section] and key not in skip:
                run.current = f"MindSpeed-RL's default of {key}"
                judge(tables[section][key], value, run)
    for key, upstream, native, here in (
        ("temperature", 0.2, "rollout.temperature", "1.0"),
        ("top_k", 50, "rollout.top_k", "off"),
    ):
        if key not in given["sampling_config"]:
            reason = (
                f"not given: upstream takes {upstream}; here {native} is {here}: what is sampled is what is trained"
            )
            run.note(Finding("not supported", reason, differs=True), f"generate_config.sampling_config.{key}")
