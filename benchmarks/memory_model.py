"""Is the estimate of `covey plan` right? It is compared with the real code on tensors without numbers (simulated.py).

    python benchmarks/memory_model.py            # Qwen2.5-7B and 32B on 16 and 1,024 ranks: about 10 minutes
    python benchmarks/memory_model.py 32B pp     # only cases whose names have all of these words
    python benchmarks/memory_model.py --small    # few layers: a minute

Weights with AdamW's moments and gradients must agree within 1 %, peaks of the update within 15 %; else exit code 1.
Not simulated: rollout, context parallelism (its row numbers are read from tensors), the norm of the gradient.
"""

from __future__ import annotations

import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from simulated import Simulated, simulate
from transformers import AutoModelForCausalLM, Qwen2Config

from covey.config.schema import Config
from covey.distributed.mesh import Mesh, resolve_degrees
from covey.memory import memory_per_rank, peak_bytes, phase_bytes

SIZES: dict[str, dict[str, Any]] = {  # from the models' config.json
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "32B": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
    "tiny": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
    },
}
SHARDS, PEAK = 0.01, 0.15


@dataclass(frozen=True)
class Case:
    """A model on so many ranks."""

    size: str
    world: int
    parallel: dict[str, Any] = field(default_factory=dict)
    checkpointing: bool = True
    tokens: int = 8192  # of a micro-batch
    micro_batches: int = 2
    layers: int | None = None
    tied: bool = False

    @property
    def name(self) -> str:
        """For the table."""
        given = " ".join(f"{key}={value}" for key, value in self.parallel.items())
        kept = "" if self.checkpointing else ", all activations"
        return f"{self.size} on {self.world}: {given or 'dp'}{kept}, {self.micro_batches} x {self.tokens} tokens"


def cases(small: bool) -> list[Case]:
    """What is compared."""
    every = {"reduce_every_micro_batch": True}
    if small:
        return [
            Case("tiny", 4, {}, tokens=1024),
            Case("tiny", 4, every, tokens=1024, tied=True),
            Case("tiny", 4, {"tp": 2}, tokens=1024, checkpointing=False),
            Case("tiny", 8, {"tp": 2, "sequence_parallel": True}, tokens=2048, checkpointing=False, micro_batches=1),
            Case("tiny", 4, {"pp": 2}, tokens=1024, micro_batches=4),
            Case("tiny", 1024, {"dp_replicate": 64}, tokens=1024, micro_batches=1),
        ]
    return [
        Case("7B", 16, {}),
        Case("7B", 16, every),
        Case("7B", 16, {"tp": 2}, checkpointing=False, micro_batches=1),
        Case("7B", 16, {"tp": 4, "sequence_parallel": True}, tokens=16384),
        Case("7B", 16, {"pp": 2}, micro_batches=4),
        Case("32B", 16, every),
        Case("32B", 16, {"tp": 8, "sequence_parallel": True}, tokens=16384),
        Case("32B", 16, {"tp": 4, "pp": 2} | every, micro_batches=4),
        Case("7B", 1024, {"dp_replicate": 64}, micro_batches=1),
        Case("32B", 1024, {"tp": 8, "dp_replicate": 8}, micro_batches=1),
    ]


def compare(case: Case) -> tuple[Simulated, dict[str, int], dict[str, int]]:
    """(simulated, estimated parts, estimated bytes by phase) of the rank that needs the most."""
    sizes = dict(SIZES[case.size])
    sizes["num_hidden_layers"] = case.layers or sizes["num_hidden_layers"]

    def network() -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(Qwen2Config(tie_word_embeddings=case.tied, **sizes))

    num_samples = 7  # with the prompt, eight sequences of equal length: attention on the cpu then pads nothing
    length = case.tokens // (num_samples + 1)
    config = _config(case, length, num_samples)
    degrees = config.parallel.model_dump(include={"dp_replicate", "dp_shard", "cp", "tp", "pp"})
    mesh = Mesh(*resolve_degrees(case.world, **degrees))
    memory = memory_per_rank(config, network(), mesh, torch.bfloat16)
    lengths = {"prompt": length, "response": length + 1, "dtype": torch.bfloat16}
    ends = {0, (mesh.pp - 1) * (case.world // mesh.pp)}  # a rank of the first and of the last stage
    found = [simulate(config, network(), case.world, rank=rank, **lengths) for rank in sorted(ends)]
    return max(found, key=lambda one: one.peak), memory, phase_bytes(memory)


def _config(case: Case, length: int, num_samples: int) -> Config:
    inner = case.parallel.get("tp", 1) * case.parallel.get("pp", 1)
    return Config.model_validate(
        {
            "model": {"path": "none", "gradient_checkpointing": case.checkpointing},
            "data": {"train": "none", "max_prompt_length": length},
            "rollout": {"num_samples": num_samples, "max_response_length": length + 1},
            "reward": {"functions": ["math"]},
            "algorithm": {"kl_coef": 0.0},
            "train": {
                "batch_size": case.world // inner * case.micro_batches,
                "max_tokens_per_micro_batch": case.tokens,
            },
            "parallel": case.parallel,
            "output_dir": "none",
        }
    )


def errors(found: Simulated, memory: dict[str, int], phases: dict[str, int]) -> dict[str, float]:
    """Relative differences of the estimate."""
    pairs = {
        "weights": (memory["weights"], found.weights),
        "moments": (memory["AdamW moments"], found.moments),
        "gradients": (memory["gradients"], found.gradients),
        "update": (phases["gradients"], found.update_peak),
        "optimizer": (phases["optimizer"], found.optimizer_peak),
    }
    return {name: estimated / real - 1 for name, (estimated, real) in pairs.items()}


def main() -> int:
    """Print the table; 1 when a bound is exceeded."""
    warnings.simplefilter("ignore")  # torch's, about names that are to change
    print("GiB of a rank, simulated and (estimated)")
    print("| case | weights, moments | gradients | peak of the update | of the optimizer | seconds |")
    print("|---|---|---|---|---|---|")
    failed = 0
    words = [word for word in sys.argv[1:] if word != "--small"]
    chosen = [case for case in cases("--small" in sys.argv[1:]) if all(word in case.name for word in words)]
    if not chosen:
        print(f"no case is named {' '.join(words)}")
        return 2
    for case in chosen:
        start = time.perf_counter()
        found, memory, phases = compare(case)
        wrong = errors(found, memory, phases)
        bad = [
            name for name, error in wrong.items() if abs(error) > (PEAK if name in ("update", "optimizer") else SHARDS)
        ]
        failed += bool(bad)
        held = memory["weights"] + memory["AdamW moments"]
        cells = [
            f"{_gib(found.weights + found.moments)} ({_gib(held)})",
            f"{_gib(found.gradients)} ({_gib(memory['gradients'])})",
            f"{_gib(found.update_peak)} ({_gib(phases['gradients'])}, {wrong['update']:+.1%})",
            f"{_gib(found.optimizer_peak)} ({_gib(phases['optimizer'])}, {wrong['optimizer']:+.1%})",
            f"{time.perf_counter() - start:.0f}",
        ]
        print(
            f"| {case.name} | {' | '.join(cells)} |" + (f" OUT OF BOUNDS: {', '.join(bad)}" if bad else ""), flush=True
        )
        assert found.micro_batches == case.micro_batches and peak_bytes(memory) >= phases["gradients"]
    return int(failed > 0)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


if __name__ == "__main__":
    sys.exit(main())
