"""Does every objective learn? One tiny task, trained with each preset and option through `covey.trainer.train`.

    python benchmarks/learning.py [VARIANT ...] [--steps N] [--seeds N]

Task: three letters, answer with the last one and the first one; half of the reward for each. The model is an untrained
two-layer Qwen2 with 10 tokens, so that an answer is right once in 100 times. Held-out prompts are letter triples that
are never trained on. Prints a Markdown table of the held-out reward before and after.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LETTERS = "abcdefgh"
# Held-out reward that every objective must gain; an untrained model has about 0.1.
MARGIN = 0.2
MINI = {"mini_batch_size": 8}  # two optimizer steps a rollout: the second is off policy

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"preset": "grpo", **MINI},
    "dapo": {"preset": "dapo", **MINI},
    "dr_grpo": {"preset": "dr_grpo", **MINI},
    "gspo": {"preset": "gspo", **MINI},
    "gspo_token": {"preset": "gspo_token", **MINI},
    "luspo": {"preset": "luspo", **MINI},
    "cispo": {"preset": "cispo", **MINI},
    "sapo": {"preset": "sapo", **MINI},
    "vespo": {"preset": "vespo", **MINI},
    "reinforce": {"preset": "reinforce"},
    "rloo": {"preset": "rloo", **MINI},
    "reinforce_plus_plus": {"preset": "reinforce_plus_plus", **MINI},
    "reinforce_plus_plus_baseline": {"preset": "reinforce_plus_plus_baseline", **MINI},
    "dapo, batch_std": {"preset": "dapo", "advantage": "batch_std", **MINI},
    "dapo, dual_clip 3": {"preset": "dapo", "dual_clip": 3.0, **MINI},
    "cispo, sequence_ratio": {"preset": "cispo", "sequence_ratio": True, **MINI},
    "sapo, sequence_ratio": {"preset": "sapo", "sequence_ratio": True, **MINI},
    "dapo, low_var_kl steered to 0.05": {
        "preset": "dapo",
        "kl_coef": 0.01,
        "kl_estimator": "low_var_kl",
        "kl_importance_weighted": True,
        "kl_target": 0.05,
        "kl_horizon": 500,
        **MINI,
    },
    "dapo, entropy_coef 0.001": {"preset": "dapo", "entropy_coef": 1e-3, **MINI},
    "dapo, top_entropy_share 0.5": {"preset": "dapo", "top_entropy_share": 0.5, **MINI},
    "dapo, token_truncate": {"preset": "dapo", "rollout_correction": "token_truncate", **MINI},
    "dapo, sequence_mask": {"preset": "dapo", "rollout_correction": "sequence_mask", **MINI},
    "dapo, off_policy_max_kl 0.1": {"preset": "dapo", "off_policy_max_kl": 0.1, **MINI},
    "dapo, max_rounds 3": {"preset": "dapo", "max_rounds": 3, **MINI},
    "dapo, pass_at_k": {"preset": "dapo", "advantage": "pass_at_k", **MINI},
    "rloo, kl_in_reward": {"preset": "rloo", "kl_in_reward": True, "kl_estimator": "k1", "kl_coef": 0.01, **MINI},
    "dapo, 2 epochs": {"preset": "dapo", "epochs": 2, **MINI},
}


def reward(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[float]:
    """0.5 for each right letter."""
    del config
    return [
        sum(0.5 for given, right in zip(text, row["answer"], strict=False) if given == right)
        for text, row in zip(responses, rows, strict=True)
    ]


def run(algorithm: dict[str, Any], directory: Path, *, steps: int, seed: int) -> tuple[float, float]:
    """Held-out reward before and after `steps` steps of this objective, in an empty directory."""
    from covey.config.load import LoadedConfig
    from covey.config.schema import Config
    from covey.trainer import train

    make_model(directory / "model", seed)
    train_rows, eval_rows = make_rows(directory, seed)
    config = Config.model_validate(
        {
            "model": {"path": str(directory / "model")},
            "data": {"train": str(train_rows), "eval": str(eval_rows), "prompt_type": "empty"},
            "rollout": {"num_samples": 8, "max_response_length": 2},
            "reward": {"functions": [{"name": f"{Path(__file__).resolve()}:reward"}], "num_workers": 0},
            "algorithm": algorithm,
            "train": {"steps": steps, "batch_size": 16, "lr": 2e-3, "weight_decay": 0.0},
            "evaluation": {"every": steps, "num_samples": 4},
            "checkpoint": {"export": False},
            "logging": {"records": False},
            "output_dir": str(directory / "run"),
            "seed": seed,
            "device": "cpu",
        }
    )
    evaluations = train(LoadedConfig(config, {}, "learning"), quiet=True)["evaluations"]
    return evaluations["0"]["eval/reward"], evaluations[str(steps)]["eval/reward"]


def make_model(directory: Path, seed: int) -> None:
    """An untrained model and its tokenizer: one token a letter, <eos> and <pad>."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *LETTERS])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], eos_token="<eos>", pad_token="<pad>", unk_token="<eos>")
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<pad>"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_rows(directory: Path, seed: int) -> tuple[Path, Path]:
    """(training rows, held-out rows): all triples of letters, 64 of them held out."""
    triples = ["".join(letters) for letters in itertools.product(LETTERS, repeat=3)]
    random.Random(seed).shuffle(triples)
    files = directory / "train.jsonl", directory / "eval.jsonl"
    for file, part in zip(files, (triples[64:], triples[:64]), strict=True):
        file.write_text(
            "".join(json.dumps({"problem": t, "answer": t[2] + t[0]}) + "\n" for t in part), encoding="utf-8"
        )
    return files


def main() -> int:
    """Print the table; 1 when a variant gains less than MARGIN on some seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"default: all of {', '.join(VARIANTS)}")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    logging.disable(logging.INFO)
    unknown = set(args.variants) - set(VARIANTS)
    if unknown:
        parser.error(f"unknown variant {sorted(unknown)}")
    print(f"| objective | held-out reward before | after {args.steps} steps, {args.seeds} seeds | seconds |")
    print("|---|---|---|---|", flush=True)
    failed = False
    for name in args.variants or VARIANTS:
        start = time.perf_counter()
        results = []
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as directory:
                results.append(run(VARIANTS[name], Path(directory), steps=args.steps, seed=seed))
        failed |= any(after - before < MARGIN for before, after in results)
        before = sum(b for b, _ in results) / len(results)
        after = ", ".join(f"{a:.2f}" for _, a in results)
        seconds = (time.perf_counter() - start) / len(results)
        print(f"| {name} | {before:.2f} | {after} | {seconds:.0f} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
