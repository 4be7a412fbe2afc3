"""`covey train --dry-run`: everything that can be found out before weights are read.

The model is built from config.json on the meta device; tokenizer, rewards and (where the data is on this disk) prompts
are real. No processes join: `WORLD_SIZE=16 covey train FILE --dry-run` checks a layout of 16 on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from covey import device as devices
from covey import preflight
from covey.algorithm.losses import find_loss
from covey.config.load import LoadedConfig
from covey.config.schema import Config
from covey.credit import check_advantage
from covey.data.load import is_preprocessed
from covey.distributed.mesh import Mesh, is_main_process, resolve_degrees, world_size
from covey.distributed.pipeline_order import describe_stages, layers_of_chunks
from covey.memory import head_dim, memory_per_rank, peak_bytes
from covey.models.architectures import architecture, layers_of
from covey.models.fused import attention_backend
from covey.models.load import FAMILIES, check_vocabulary, load_skeleton, load_tokenizer, stop_ids
from covey.parallel import check_heads
from covey.reference import check_teacher_tokens
from covey.rewards.base import split_name
from covey.rewards.runner import Scorer
from covey.rollout.reward_model import NAME as REWARD_MODEL
from covey.setup import Prompts, attach_adapter, check_tasks, load_prompts

T = TypeVar("T")


def dry_run(loaded: LoadedConfig[Config], *, resume: bool = False) -> dict[str, Any]:
    """What a run would start with.

    `ok`, `problems` (each would stop the run), `unchecked` (what is not on this machine), `notes`, `facts` (the
    start-up tables), `memory_bytes` of a rank by what holds them, `peak_bytes` of them at one time. Facts and memory
    are empty when the model cannot be built.
    """
    config = loaded.config
    report = _Report()
    report.attempt(lambda: preflight.check_output_dir(Path(config.output_dir), resume))
    report.attempt(lambda: find_loss(config.algorithm.loss))
    report.attempt(lambda: check_advantage(config.algorithm.advantage))
    device = report.attempt(lambda: devices.resolve(config.device, config.model.dtype))
    mesh = report.attempt(lambda: _layout(config))
    path, trust = config.model.path, config.model.trust_remote_code
    model = report.attempt(lambda: load_skeleton(path, trust_remote_code=trust))
    tokenizer = report.attempt(lambda: load_tokenizer(config.model.tokenizer or path, trust_remote_code=trust))
    scorer, rewards = _rewards(config, report)
    prompts = None if tokenizer is None else _prompts(config, tokenizer, report)
    if scorer is not None:
        if prompts is not None:
            report.attempt(lambda: check_tasks(scorer, prompts, config.reward.task_key))
            report.attempt(lambda: _check_pass_on(config, scorer, prompts))
        scorer.close()
    facts: dict[str, dict[str, str]] = {}
    memory: dict[str, int] = {}
    if model is not None and config.lora is not None:
        lora = config.lora
        report.attempt(lambda: attach_adapter(model, lora, config.model, seed=config.seed, dtype=torch.float32))
    if model is not None and mesh is not None and device is not None:
        longest = config.data.max_prompt_length if prompts is None else int(prompts.train.lengths.max())
        _check_layout(config, model, mesh, report)
        report.attempt(lambda: preflight.check_lengths(longest, config, model.config))
        report.attempt(lambda: _check_cache(config, model, mesh.tp, device.dtype, longest))
        if config.model.ref_path and config.algorithm.kl_coef:
            report.attempt(lambda: load_skeleton(str(config.model.ref_path), trust_remote_code=trust))
        teacher = _teacher(config, tokenizer, report)
        memory = report.attempt(lambda: memory_per_rank(config, model, mesh, device.dtype, teacher)) or {}
        if tokenizer is not None:
            report.attempt(lambda: check_vocabulary(model, tokenizer))
            found = report.attempt(lambda: _facts(config, device, mesh, model, tokenizer, prompts, rewards))
            facts = found or {}
    return {
        "ok": not report.problems,
        "problems": report.problems,
        "unchecked": report.unchecked,
        "notes": [*loaded.notes, *report.notes],
        "world_size": world_size(),
        "facts": facts,
        "memory_bytes": memory,
        "peak_bytes": peak_bytes(memory),
    }


def print_report(result: dict[str, Any]) -> None:
    """The start-up tables, the memory of a rank, and what would stop the run; on standard error, on rank 0."""
    if not is_main_process():
        return
    memory = result["memory_bytes"]
    tables = dict(result["facts"])
    if memory:
        ranks = f"on each of {result['world_size']} ranks, in the rollout or in the update"
        lines = {name: _amount(size) for name, size in memory.items()}
        tables["Memory"] = lines | {"peak": f"{_amount(result['peak_bytes'])} {ranks}"}
    if result["unchecked"]:
        tables["Not checked"] = {str(i): text for i, text in enumerate(result["unchecked"], start=1)}
    tables["Verdict"] = (
        {"dry run": "ready to start"}
        if result["ok"]
        else {f"problem {i}": text for i, text in enumerate(result["problems"], start=1)}
    )
    preflight.print_facts(tables)


def _amount(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**28 else f"{size / 2**20:,.2f} MiB"


class _Report:
    """What went wrong so far."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.unchecked: list[str] = []
        self.notes: list[str] = []

    def attempt(self, check: Callable[[], T]) -> T | None:
        """The check's value; None when it raised what a user can fix, which is then a problem."""
        try:
            return check()
        except (ValueError, OSError) as error:
            if str(error) not in self.problems:  # several checks may need what one of them found impossible
                self.problems.append(str(error))
            return None


def _layout(config: Config) -> Mesh:
    degrees = config.parallel.model_dump(include={"dp_replicate", "dp_shard", "cp", "tp", "pp"})
    return Mesh(*resolve_degrees(world_size(), **degrees))


def _rewards(config: Config, report: _Report) -> tuple[Scorer | None, list[dict[str, str]]]:
    """The reward functions, loaded; those that are models only by name."""
    entries = [*config.reward.functions, *(e for several in config.reward.tasks.values() for e in several)]
    before = len(report.problems)
    for entry in entries:
        if entry.name != REWARD_MODEL:
            report.attempt(lambda name=entry.name: split_name(name))
    if len(report.problems) > before:
        return None, []
    if any(entry.name == REWARD_MODEL for entry in entries):
        report.unchecked.append("reward_model: its weights are not read")
    local = {REWARD_MODEL: _no_reward}
    scorer = report.attempt(
        lambda: Scorer(config.reward, max_response_length=config.rollout.max_response_length, local=local)
    )
    return scorer, (report.attempt(scorer.ready) or []) if scorer is not None else []


def _check_pass_on(config: Config, scorer: Scorer, prompts: Prompts) -> None:
    probe = all(row["function"] != REWARD_MODEL for row in scorer.ready())
    rows = prompts.eval or prompts.train
    preflight.check_pass_on(config.evaluation.pass_on, scorer, rows, config.reward.task_key, probe=probe)


def _no_reward(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[None]:
    raise AssertionError("a dry run scores nothing")


def _prompts(config: Config, tokenizer: Any, report: _Report) -> Prompts | None:
    train = config.data.train
    sources = [*(train if isinstance(train, list) else [train]), *([config.data.eval] if config.data.eval else [])]
    absent = [source for source in sources if not Path(source).exists() and not is_preprocessed(source)]
    if absent:
        report.unchecked.append(f"data: {', '.join(absent)}: not on this disk")
        return None
    return report.attempt(lambda: load_prompts(config, tokenizer))


def _teacher(config: Config, tokenizer: Any, report: _Report) -> Any:
    """The teacher without its weights, its tokenizer compared; None without one."""
    if config.distillation is None:
        return None
    path, trust = config.distillation.teacher, config.model.trust_remote_code
    teacher = report.attempt(lambda: load_skeleton(path, trust_remote_code=trust))
    if tokenizer is not None:
        report.attempt(lambda: check_teacher_tokens(config, tokenizer))
    return teacher


def _check_layout(config: Config, model: Any, mesh: Mesh, report: _Report) -> None:
    """Heads, layers and prompts against the ranks."""
    if mesh.world > 1:
        report.attempt(lambda: layers_of(model))
    if mesh.tp > 1:
        report.attempt(lambda: architecture(model, f"parallel.tp={mesh.tp}"))
    if mesh.tp * mesh.cp > 1:
        report.attempt(lambda: check_heads(model, mesh.tp, mesh.cp))
    if mesh.pp > 1:
        report.attempt(lambda: architecture(model, f"parallel.pp={mesh.pp}"))
        report.attempt(lambda: _chunks(config, model, mesh))
    if config.train.batch_size < mesh.num_data:
        report.notes.append(
            f"train.batch_size={config.train.batch_size} prompts for {mesh.num_data} data-parallel parts: "
            f"{mesh.num_data - config.train.batch_size} of them sample nothing"
        )
    if model.config.model_type not in FAMILIES:
        report.unchecked.append(f"the numeric self-test of model_type {model.config.model_type!r} needs weights")


def _check_cache(config: Config, model: Any, tp: int, dtype: torch.dtype, longest: int) -> None:
    """ValueError when the longest prompt and one response do not fit in the rollout's cache."""
    text = model.config.get_text_config()
    per_token = 2 * text.num_hidden_layers * max(1, text.num_key_value_heads // tp) * head_dim(text) * dtype.itemsize
    needed = per_token * (longest + config.rollout.max_response_length)
    if needed > config.rollout.kv_cache_bytes:
        raise ValueError(
            f"rollout.kv_cache_bytes={config.rollout.kv_cache_bytes}, but one prompt of {longest} tokens with a "
            f"response of rollout.max_response_length={config.rollout.max_response_length} needs {needed}: raise it"
        )


def _chunks(config: Config, model: Any, mesh: Mesh) -> list[range]:
    depth = model.config.get_text_config().num_hidden_layers
    return layers_of_chunks(depth, mesh.pp, config.parallel.pp_chunks, config.parallel.pp_layers)


def _facts(
    config: Config,
    device: devices.Device,
    mesh: Mesh,
    model: Any,
    tokenizer: Any,
    prompts: Prompts | None,
    rewards: list[dict[str, str]],
) -> dict[str, dict[str, str]]:
    template = prompts.train.stop_token_ids if prompts is not None else []
    stops = stop_ids(model, tokenizer, extra=[*config.rollout.stop_token_ids, *template])
    reference = config.model.kernels == "reference"
    attention = attention_backend(model, device=device.torch_device, dtype=device.dtype, reference=reference)
    facts = preflight.facts(
        config,
        device=device.describe()
        | {"attention": attention.describe()}
        | mesh.describe()
        | describe_stages(_chunks(config, model, mesh), mesh.pp),
        model=model,
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_prompts=len(prompts.train) if prompts is not None else 1,
        num_eval=len(prompts.eval) if prompts is not None and prompts.eval else 0,
        dropped=prompts.train.drops if prompts is not None else {},
        stop_tokens={i: tokenizer.convert_ids_to_tokens(i) for i in stops},
        rewards=rewards,
    )
    if prompts is None:
        facts["Data"] = {"prompts": "not read", "source": str(config.data.train)}
    return facts
