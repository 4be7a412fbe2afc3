"""Cold start: supervised fine-tuning on demonstrations, so that sampling finds some reward to begin with.

The same packing, log-probabilities and optimizer as in training; a demonstration is a group of one response. The loss
is the mean cross-entropy per response token, the stop token included. Left out: resuming (a cold start is short).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from covey import preflight
from covey.config.load import LoadedConfig
from covey.config.schema import DataConfig, LoggingConfig, SftRunConfig
from covey.data.dataset import PromptStream
from covey.data.load import load_prompts
from covey.data.prompts import PromptSet
from covey.distributed import mesh as meshes
from covey.loggers import Logger, SilentLogger, open_loggers
from covey.optim import learning_rate
from covey.setup import Parts, load_parts, make_optimizer
from covey.types import Group, Prompt, Response


def run(loaded: LoadedConfig[SftRunConfig]) -> dict[str, Any]:
    """Train, write OUTPUT/model and OUTPUT/summary.json, return the summary."""
    config = loaded.config
    output = Path(config.output_dir)
    if meshes.is_main_process():
        preflight.check_output_dir(output, resume=None)
    parts = load_parts(
        config.model,
        config.train,
        config.parallel,
        kind=config.device,
        temperature=1.0,
        lora=config.lora,
        seed=config.seed,
        debug=config.debug,
        deterministic=config.deterministic,
    )
    prompts = _demonstrations(config, parts)
    stop_id = (prompts.stop_token_ids or [parts.tokenizer.eos_token_id])[0]
    batch_size = min(config.train.batch_size, len(prompts))
    stream = PromptStream(prompts, batch_size=batch_size, seed=config.seed)
    steps = config.train.steps
    if config.sft.epochs is not None:
        steps = max(1, config.sft.epochs * len(prompts) // batch_size)
    optimizer = make_optimizer(parts, config.train)
    logger: Logger = SilentLogger()
    if parts.mesh.is_main:
        output.mkdir(parents=True, exist_ok=True)
        logger = open_loggers(LoggingConfig(), output, total_steps=steps, print_every=config.train.print_every)
    start = time.perf_counter()
    values: dict[str, float] = {}
    try:
        for step in range(1, steps + 1):
            begin = time.perf_counter()
            groups = [_group(prompt, parts.tokenizer, stop_id) for prompt in stream.next_batch()]
            values = parts.policy.imitate(groups, optimizer=optimizer, lr=learning_rate(step - 1, config.train, steps))
            seconds = time.perf_counter() - begin
            values |= {"timing/all": seconds, "sft/tps": sum(map(_num_tokens, groups)) / seconds / parts.mesh.world}
            logger.write(step, values)
    finally:
        logger.close()
    parts.policy.export(parts.tokenizer, output / "model")
    summary = {
        "steps": steps,
        "seconds": time.perf_counter() - start,
        "demonstrations": len(prompts),
        "dropped": prompts.drops,
        "loss": values["sft/loss"],
        "model": str(output / "model"),
    }
    if config.lora is not None:
        parts.policy.export_adapter(output / "adapter")
        summary["adapter"] = str(output / "adapter")
    if parts.mesh.is_main:
        (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    meshes.stop()
    return summary


def _demonstrations(config: SftRunConfig, parts: Parts) -> PromptSet:
    """Rows whose prompt and demonstration fit; ValueError when none is left or nothing can end a demonstration."""
    sft = config.sft
    data = DataConfig(
        train=sft.data,
        prompt_key=sft.prompt_key,
        response_key=sft.response_key,
        prompt_type=sft.prompt_type,
        max_prompt_length=sft.max_prompt_length,
    )
    prompts = load_prompts(sft.data, parts.tokenizer, data)
    if not prompts.stop_token_ids and parts.tokenizer.eos_token_id is None:
        raise ValueError(f"{config.model.path}: the tokenizer has no eos_token, so no demonstration can end; add one")
    fits = [i for i, p in enumerate(prompts) if 0 < len(_encode(p, parts.tokenizer)) < sft.max_response_length]
    if not fits:
        raise ValueError(
            f"{prompts.source}: no demonstration has 1 to {sft.max_response_length - 1} tokens; "
            "raise sft.max_response_length"
        )
    kept = prompts.select(np.array(fits))
    if len(fits) < len(prompts):
        kept.drops["response_length"] = len(prompts) - len(fits)
    return kept


def _encode(prompt: Prompt, tokenizer: Any) -> list[int]:
    return tokenizer.encode(prompt.row["response"] or "", add_special_tokens=False)


def _group(prompt: Prompt, tokenizer: Any, stop_id: int) -> Group:
    ids = [*_encode(prompt, tokenizer), stop_id]
    return Group(prompt, [Response(token_ids=ids, logprobs=[0.0] * len(ids), text=prompt.row["response"])])


def _num_tokens(group: Group) -> int:
    return len(group.prompt.input_ids) + len(group.responses[0].token_ids)
