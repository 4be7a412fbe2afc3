"""The two programs that compare_trl.py times: a Covey run and TRL's GRPOTrainer, each on the same model and prompts.

Both sample exactly R tokens: neither stops at a stop token. Both run one optimizer step per rollout in fp32, without KL
term and without gradient checkpointing.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import offline
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from covey.config.load import LoadedConfig
from covey.config.schema import Config
from covey.rollout.native import NativeEngine
from covey.trainer import Run


@dataclass(frozen=True)
class Case:
    """What is run: P tokens of prompt, G responses, B prompts, R tokens of response."""

    size: str  # key of offline.SIZES
    prompt: int
    group: int
    batch: int
    response: int
    threads: int

    @property
    def shape(self) -> str:
        """As the results name it."""
        size = "" if self.size == "31.5M" else f" ({self.size})"
        return f"P{self.prompt} G{self.group} B{self.batch} R{self.response}{size}"


@dataclass
class Seconds:
    """One number a repeat."""

    step: list[float] = field(default_factory=list)
    rollout: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)


def covey_run(case: Case, directory: Path, *, steps: int) -> Run:
    """A run as `covey train` makes it, except that nothing stops a response before R tokens."""
    config = Config.model_validate(
        {
            "model": {
                "path": str(directory / "model"),
                "tokenizer": str(directory / "tokenizer"),
                "dtype": "float32",
            },
            "data": {
                "train": str(directory / "prompts.jsonl"),
                "response_key": None,
                "prompt_type": "empty",
                "max_prompt_length": case.prompt,
            },
            "rollout": {"num_samples": case.group, "max_response_length": case.response},
            "reward": {"functions": [{"name": f"{offline.__file__}:reward"}]},
            "train": {"steps": steps, "batch_size": case.batch, "lr": 1e-6},
            "output_dir": str(directory / "covey"),
            "device": "cpu",
        }
    )
    run = Run(LoadedConfig(config, {}, "benchmark"), resume=None, quiet=True)
    run.engine = NativeEngine(
        run.policy.model,
        stop_token_ids=[],
        decode=lambda ids: run.parts.tokenizer.decode(ids, skip_special_tokens=True),
        max_num_seqs=config.rollout.max_num_seqs,
        kv_cache_bytes=config.rollout.kv_cache_bytes,
    )
    return run


def covey_step(run: Run, number: int, seconds: Seconds) -> None:
    """One whole step, records on disk included."""
    start = time.perf_counter()
    values = run.step(number)
    seconds.step.append(time.perf_counter() - start)
    seconds.rollout.append(values["timing/rollout"])
    seconds.update.append(values["timing/update"])
    expected = run.config.rollout.max_response_length
    assert values["response_length/min"] == expected, "a response stopped early: the comparison would not be fair"


class Watch(TrainerCallback):
    """Times TRL's steps from outside, and runs `between` after each, outside of its time."""

    def __init__(self, seconds: Seconds, between: Callable[[], None]) -> None:
        self.seconds = seconds
        self.between = between
        self.generated = 0.0
        self.prepared = 0.0
        self.start = 0.0

    def on_step_begin(self, *_args: Any, **_options: Any) -> None:
        """The step's first moment: its rollout follows."""
        self.start = time.perf_counter()

    def on_step_end(self, *_args: Any, **_options: Any) -> None:
        """After the optimizer step."""
        step = time.perf_counter() - self.start
        self.seconds.step.append(step)
        self.seconds.rollout.append(self.generated)
        self.seconds.update.append(step - self.prepared)
        self.between()


def trl_trainer(case: Case, directory: Path, prompts: list[str], *, steps: int) -> Any:
    """TRL's trainer with the settings of the same run."""
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    def even_share(completions: list[str], **_columns: Any) -> list[float | None]:
        return [offline.score(text) for text in completions]

    config = GRPOConfig(
        output_dir=str(directory / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=case.batch * case.group,
        num_generations=case.group,
        max_completion_length=case.response,
        max_steps=steps,
        learning_rate=1e-6,
        temperature=1.0,
        beta=0.0,
        generation_kwargs={"eos_token_id": None},
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return GRPOTrainer(
        model=model,
        reward_funcs=even_share,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in prompts]),
        processing_class=AutoTokenizer.from_pretrained(directory / "tokenizer"),
    )


def watch(trainer: Any, seconds: Seconds, between: Callable[[], None]) -> None:
    """Attach the stop-watches: the whole step, its generation, and everything before the loss."""
    stopwatch = Watch(seconds, between)
    trainer.add_callback(stopwatch)

    def timed(name: str, attribute: str) -> None:
        function = getattr(trainer, name)

        def wrapper(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **options)
            setattr(stopwatch, attribute, time.perf_counter() - start)
            return result

        setattr(trainer, name, wrapper)

    timed("_generate", "generated")
    timed("_generate_and_score_completions", "prepared")


class PeakMemory:
    """Most resident memory of this process above what it had at `start`, bytes. Linux."""

    def __init__(self) -> None:
        self.peak = 0
        self._base = 0

    def start(self) -> None:
        """Give freed memory back to the system, and forget the peak so far."""
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._base = _status_bytes("VmRSS")

    def stop(self) -> None:
        """Read the peak since `start`; the first call counts."""
        self.peak = self.peak or _status_bytes("VmHWM") - self._base


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{key}:")))
