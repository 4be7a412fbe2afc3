"""Short trained runs, healthy and with a planted fault: a tiny model learns to answer three letters.

Task of learning.py (the last letter, then the first) with room for six tokens: half of the reward for each letter. The
model has imitated answers of which half are guesses, so that it stops after two letters. A run takes some seconds on a
CPU.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.learning import LETTERS, make_model, make_rows

STEPS = 40
_HERE = Path(__file__).resolve()


def reward(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[float]:
    """0.5 for each right letter of an answer of two letters."""
    del config
    return [
        sum(0.5 for given, right in zip(text, row["answer"], strict=True) if given == right) if len(text) == 2 else 0.0
        for text, row in zip(responses, rows, strict=True)
    ]


def constant(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[float]:
    """1 for everything."""
    del rows, config
    return [1.0] * len(responses)


def form(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[float]:
    """1 for answers that begin with `a`, right or not."""
    del rows, config
    return [float(text.startswith("a")) for text in responses]


def raising(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[float]:
    """`reward`, but answers that begin with `b` are more than it can bear."""
    if any(text.startswith("b") for text in responses):
        raise KeyError("b")
    return reward(responses, rows, config)


def slow(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[float]:
    """`reward`, but answers that begin with `b` take a second."""
    if any(text.startswith("b") for text in responses):
        time.sleep(1.0)
    return reward(responses, rows, config)


def partial(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[float | None]:
    """`reward`, but answers that begin with `b` or `c` are not scored."""
    scores = reward(responses, rows, config)
    return [None if text[:1] in ("b", "c") else score for text, score in zip(responses, scores, strict=True)]


def function(name: str, **entry: Any) -> dict[str, Any]:
    """An entry of reward.functions for a function of this file."""
    return {"name": f"{_HERE}:{name}", **entry}


def train_run(directory: Path, *, steps: int = STEPS, rows: int | None = None, **config: Any) -> None:
    """Train in `directory`. config: sections of the YAML. rows: the training rows are so many, over and over."""
    from covey.config.load import LoadedConfig
    from covey.config.schema import Config
    from covey.trainer import train

    work = directory.parent / f"{directory.name}-material"
    work.mkdir(parents=True)
    train_rows, eval_rows = make_rows(work, seed=0)
    if rows is not None:
        lines = train_rows.read_text(encoding="utf-8").splitlines(keepends=True)
        train_rows.write_text("".join(lines[i % rows] for i in range(len(lines))), encoding="utf-8")
    settings: dict[str, Any] = {
        "model": {"path": str(_start(directory.parent / "start"))},
        "data": {"train": str(train_rows), "eval": str(eval_rows), "prompt_type": "empty"},
        "rollout": {"num_samples": 8, "max_response_length": 6},
        "reward": {"functions": [function("reward", label="letters")], "num_workers": 0},
        "algorithm": {"preset": "dapo", "mini_batch_size": 8},
        "train": {"steps": steps, "batch_size": 16, "lr": 2e-3, "weight_decay": 0.0, "warmup_steps": 4},
        "evaluation": {"every": 10, "num_samples": 4},
        "checkpoint": {"export": True},
        "logging": {"tensorboard": False},
        "output_dir": str(directory),
        "seed": 0,
        "device": "cpu",
    }
    for key, value in config.items():
        settings[key] = settings.get(key, {}) | value if isinstance(value, dict) else value
    train(LoadedConfig(Config.model_validate(settings), {}, "trained_runs"), quiet=True)


def _start(directory: Path) -> Path:
    """A model that imitates answers, half of them guesses; made once for all runs beside `directory`."""
    from covey import sft
    from covey.config.load import LoadedConfig
    from covey.config.schema import SftRunConfig

    model = directory / "run" / "model"
    if model.is_dir():
        return model
    directory.mkdir(parents=True)
    make_model(directory / "untrained", seed=0)
    rows = [json.loads(line) for line in make_rows(directory, seed=0)[0].read_text(encoding="utf-8").splitlines()]
    rng = random.Random(0)
    guess = [row["answer"] if rng.random() < 0.5 else "".join(rng.choices(LETTERS, k=2)) for row in rows]
    demonstrations = [{"prompt": row["problem"], "response": text} for row, text in zip(rows, guess, strict=True)]
    file = directory / "demonstrations.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in demonstrations), encoding="utf-8")
    settings = {
        "model": {"path": str(directory / "untrained")},
        "sft": {"data": str(file), "prompt_type": "empty"},
        "train": {"steps": 60, "batch_size": 64, "lr": 4e-3, "warmup_steps": 5},
        "output_dir": str(directory / "run"),
        "device": "cpu",
    }
    sft.run(LoadedConfig(SftRunConfig.model_validate(settings), {}, "trained_runs"))
    return model
