"""`make bench`: Covey against TRL's GRPOTrainer on this machine, in this environment.

Same weights, prompts, lengths and threads; the two take turns in one process, and the fastest of their repeats counts.
Memory is measured in a process of its own for each. Prints a table and writes benchmarks/results/latest.json, a list of
{name, shape, threads, ours, peer, peer_name, unit, ratio}; ratio is how many times better than the peer, or, where the
peer is the matrix peak, the share of it that was reached.

    python benchmarks/compare_trl.py [--quick] [--only NAME] [--repeats N]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import offline
import torch
from peaks import Peak
from sides import Case, PeakMemory, Seconds, covey_run, covey_step, trl_trainer, watch

from covey.algorithm.logprobs import chunk_rows
from covey.rollout.engine import Sampling
from covey.types import StepBatch

RESULTS = Path(__file__).parent / "results" / "latest.json"
MAIN: dict[str, Any] = {"size": "31.5M", "prompt": 256, "group": 8, "batch": 2, "response": 64}
SMALL: dict[str, Any] = {"size": "0.8M", "prompt": 8, "group": 8, "batch": 16, "response": 24}

# What is measured: kind, repeats, case. --quick runs those marked so.
PLAN: list[tuple[str, int, Case, bool]] = [
    ("steps", 6, Case(**SMALL, threads=1), True),
    ("steps", 6, Case(**SMALL, threads=2), False),
    ("steps", 2, Case(**MAIN, threads=2), True),
    ("steps", 2, Case(**MAIN, threads=1), False),
    ("steps", 2, Case("31.5M", prompt=64, group=8, batch=2, response=128, threads=2), False),
    ("rollout", 2, Case("31.5M", prompt=1024, group=8, batch=2, response=64, threads=2), False),
    ("rollout", 2, Case("31.5M", prompt=64, group=1, batch=16, response=64, threads=2), False),
    ("memory", 1, Case(**MAIN, threads=2), True),
    ("memory", 1, Case(**{**MAIN, "size": "31.5M, vocabulary 152k"}, threads=2), False),
]


def main() -> None:
    """Run the plan, each entry in processes of its own, and report."""
    parser = argparse.ArgumentParser(description="Compare Covey with TRL on this machine.")
    parser.add_argument("--quick", action="store_true", help="a few shapes, one repeat")
    parser.add_argument("--only", choices=["steps", "rollout", "memory"], help="one kind of measurement")
    parser.add_argument("--repeats", type=int, help="turns of each side")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(json.loads(options.worker), options.out)
        return
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for kind, repeats, case, quick in PLAN:
        if (options.quick and not quick) or (options.only and kind != options.only):
            continue
        repeats = options.repeats or (1 if options.quick else repeats)
        rows += measure(kind, repeats, case)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} results in {time.perf_counter() - start:.0f} s, written to {options.out}")


def measure(kind: str, repeats: int, case: Case) -> list[dict[str, Any]]:
    """The rows of one entry of the plan, printed as they come."""
    if kind == "memory":
        ours, peer = (spawn({"kind": f"memory {side}", "repeats": 1, "case": asdict(case)}) for side in ("ours", "trl"))
        gradient = ours["gradient"]
        rows = [
            row("update_memory", case, ours["peak"] / 2**20, peer["peak"] / 2**20, "TRL", "MiB"),
            row(
                "update_memory_without_gradient",
                case,
                (ours["peak"] - gradient) / 2**20,
                (peer["peak"] - gradient) / 2**20,
                "TRL",
                "MiB",
            ),
        ]
    else:
        rows = spawn({"kind": kind, "repeats": repeats, "case": asdict(case)})
    for r in rows:
        print(
            f"{r['name']:<32}{r['shape']:<44}{r['threads']} threads  ours {r['ours']:>9.2f}  "
            f"{r['peer_name']} {r['peer']:>9.2f} {r['unit']:<9} {r['ratio']:.2f}",
            flush=True,
        )
    return rows


def spawn(task: dict[str, Any]) -> Any:
    """Do `task` in a fresh process with its number of threads, and return what it found."""
    threads = str(task["case"]["threads"])
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "result.json"
        command = [sys.executable, __file__, "--worker", json.dumps(task), "--out", str(out)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{task}\n{done.stderr[-4000:]}")
        return json.loads(out.read_text(encoding="utf-8"))


def work(task: dict[str, Any], out: Path) -> None:
    """What a worker process does."""
    case, repeats = Case(**task["case"]), task["repeats"]
    torch.set_num_threads(case.threads)
    directory = out.parent
    offline.make_model(directory / "model", offline.SIZES[case.size])
    offline.make_tokenizer(directory / "tokenizer", offline.SIZES[case.size])
    prompts = offline.make_prompts(
        directory / "prompts.jsonl",
        count=case.batch * (repeats + 1),
        length=case.prompt,
        vocab=offline.SIZES[case.size].vocab,
    )
    kinds = {
        "steps": lambda: compare_steps(case, directory, prompts, repeats),
        "rollout": lambda: compare_rollout(case, directory, repeats),
        "memory ours": lambda: memory_ours(case, directory),
        "memory trl": lambda: memory_trl(case, directory, prompts),
    }
    out.write_text(json.dumps(kinds[task["kind"]]()), encoding="utf-8")


def compare_steps(case: Case, directory: Path, prompts: list[str], repeats: int) -> list[dict[str, Any]]:
    """Whole step, rollout and update against TRL, and the shares of the matrix peak."""
    ours, peer = Seconds(), Seconds()
    run = covey_run(case, directory, steps=repeats)
    trainer = trl_trainer(case, directory, prompts, steps=repeats)
    watch(trainer, peer, between=lambda: covey_step(run, len(ours.step) + 1, ours))
    trainer.train()
    longest = [log["completions/max_length"] for log in trainer.state.log_history if "completions/max_length" in log]
    assert set(longest) == {case.response}, f"TRL sampled {longest} tokens: the comparison would not be fair"
    rows = [
        row(name, case, min(getattr(ours, name)), min(getattr(peer, name)), "TRL", "s")
        for name in ("step", "update", "rollout")
    ]
    tokens = case.batch * case.group * (case.prompt + case.response)
    rows.append(
        row(
            "step_tokens",
            case,
            tokens / min(ours.step),
            tokens / min(peer.step),
            "TRL",
            "tokens/s",
            more_is_better=True,
        )
    )
    return rows + shares(case, run, min(ours.update))


def shares(case: Case, run: Any, update_seconds: float) -> list[dict[str, Any]]:
    """How much of the matrix peak at their own shapes the update and the decode steps reach."""
    size = offline.SIZES[case.size]
    peak, responses = Peak(size), case.batch * case.group
    chunk = chunk_rows(size.vocab, run.config.train.logits_chunk_bytes)
    packed = case.batch * (case.prompt + case.group * (case.response - 1))
    training = peak.training(packed, responses * case.response, min(chunk, responses * case.response))
    decode = peak.forward(responses, responses)
    prompts = run.stream.next_batch()
    whole, first = (
        min(_seconds(lambda n=n: run.engine.generate(prompts, Sampling(case.group, n))) for _ in range(2))
        for n in (case.response, 1)
    )
    per_token = (whole - first) / (case.response - 1)
    return [
        row(
            name,
            case,
            w.flops / seconds / 1e9,
            w.flops / w.seconds / 1e9,
            "matrix peak",
            "GFLOP/s",
            more_is_better=True,
        )
        for name, w, seconds in (
            ("update_peak_share", training, update_seconds),
            ("decode_peak_share", decode, per_token),
        )
    ]


def compare_rollout(case: Case, directory: Path, repeats: int) -> list[dict[str, Any]]:
    """Sampling alone against `generate` of transformers, which is what TRL samples with."""
    from transformers import AutoModelForCausalLM

    run = covey_run(case, directory, steps=1)
    model: Any = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
    prompts = run.stream.next_batch()
    ids = torch.tensor([prompt.input_ids for prompt in prompts]).repeat_interleave(case.group, dim=0)
    length = {"max_new_tokens": case.response, "min_new_tokens": case.response}
    sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "pad_token_id": 0}
    ours, peer = [], []
    for _ in range(repeats):
        ours.append(_seconds(lambda: run.engine.generate(prompts, Sampling(case.group, case.response))))
        mask = torch.ones_like(ids)
        peer.append(_seconds(lambda mask=mask: model.generate(ids, attention_mask=mask, **length, **sampling)))
    return [row("rollout", case, min(ours), min(peer), "HF generate", "s")]


def memory_ours(case: Case, directory: Path) -> dict[str, float]:
    """Peak of forward and backward above the memory before them; optimizer state comes after."""
    run, memory = covey_run(case, directory, steps=1), PeakMemory()
    prompts = run.stream.next_batch()
    groups = run.engine.generate(prompts, Sampling(case.group, case.response))
    advantages = torch.randn(case.batch, case.group, generator=torch.Generator().manual_seed(0)).double().numpy()

    class Stop:
        def step(self, lr: float) -> float:
            memory.stop()
            return run.learner.optimizer.step(lr)

    memory.start()
    run.policy.update(
        StepBatch(groups, advantages, advantages),
        run.config.algorithm,
        optimizer=Stop(),
        lr=lambda _step: 1e-6,
        max_response_length=case.response,
    )
    return {"peak": memory.peak, "gradient": _gradient_bytes(run.policy.model)}


def memory_trl(case: Case, directory: Path, prompts: list[str]) -> dict[str, float]:
    """The same of TRL: from the loss to the end of backward."""
    trainer, memory = trl_trainer(case, directory, prompts, steps=1), PeakMemory()
    loss, step = trainer._compute_loss, trainer.training_step

    def compute_loss(*args: Any, **options: Any) -> Any:
        memory.start()
        return loss(*args, **options)

    def training_step(*args: Any, **options: Any) -> Any:
        result = step(*args, **options)
        memory.stop()
        return result

    trainer._compute_loss, trainer.training_step = compute_loss, training_step
    trainer.train()
    return {"peak": memory.peak, "gradient": _gradient_bytes(trainer.model)}


def row(
    name: str, case: Case, ours: float, peer: float, peer_name: str, unit: str, *, more_is_better: bool = False
) -> dict[str, Any]:
    """A line of the results."""
    return {
        "name": name,
        "shape": case.shape,
        "threads": case.threads,
        "ours": ours,
        "peer": peer,
        "peer_name": peer_name,
        "unit": unit,
        "ratio": ours / peer if more_is_better else peer / ours,
    }


def _gradient_bytes(model: Any) -> float:
    return float(sum(p.numel() * p.element_size() for p in model.parameters()))


def _seconds(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
