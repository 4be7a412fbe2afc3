"""Preprocessing: rows a second per core, scaling over processes, and peak memory against the number of rows.

    python benchmarks/data.py --rows 20000 --tokenizer DIR        speed with 1 process and with all cores
    python benchmarks/data.py --rows 1000000 --memory             peak memory of 10,000 rows and of --rows

Without --tokenizer a byte-level BPE of 8,000 tokens is trained on the same text first. Rows are made of random words,
about 200 tokens each. rows_per_core_s counts seconds of CPU time of all processes, start-up taken off; beside it stands
what the tokenizer alone reaches on the same texts in the same minute: on a busy machine compare the two.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from covey.data.settings import PreprocessConfig

WORDS = [
    *("the", "of", "and", "to", "find", "how", "many", "number", "circle", "radius", "area", "compute", "value", "if"),
    *("then", "equals", "sum", "product", "triangle", "angle", "integer", "positive", "such", "that", "every", "point"),
    *(
        "line",
        "distance",
        "speed",
        "hours",
        "12",
        "345",
        "0.5",
        "x",
        "y",
        "n",
        "\\frac{a}{b}",
        "\\boxed{}",
        "计算",
        "圆",
    ),
]


def make_rows(path: Path, count: int) -> None:
    """Rows with a question of about 190 tokens and an answer of about 10."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            text = " ".join(rng.choices(WORDS, k=130))
            row = {
                "problem": f"{i}: {text}",
                "answer": f"<answer>\\boxed{{{i}}}</answer>",
                "task": "math",
                "labels": [1.0],
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def make_tokenizer(directory: Path, rows: Path) -> None:
    """A small fast tokenizer, trained on the rows."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=["<|im_end|>"], show_progress=False)
    with rows.open(encoding="utf-8") as file:
        raw.train_from_iterator([line for _, line in zip(range(2000), file, strict=False)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>").save_pretrained(directory)


def measure(directory: Path, rows: Path, tokenizer: Path, workers: int) -> dict[str, Any]:
    """One preprocessing in a process of its own: wall and CPU seconds without start-up, and peak memory."""
    settings = directory / "p.yaml"
    settings.write_text(
        f"input: {rows}\noutput_prefix: {directory}/out{workers}\ntokenizer_name_or_path: {tokenizer}\n"
        f"workers: {workers}\n"
        "map_keys: {prompt: problem, response: answer}\noverwrite_cache: true\n"
    )
    started = time.monotonic()
    run = subprocess.run([sys.executable, __file__, "--one", str(settings)], check=True, capture_output=True, text=True)
    return {
        "workers": workers,
        "total_s": round(time.monotonic() - started, 1),
        **json.loads(run.stdout.splitlines()[-1]),
    }


def one(settings: str) -> dict[str, Any]:
    """In the measured process. Start-up (imports, reading the tokenizer) is measured with ten rows and taken off."""
    from covey.data.preprocess import preprocess
    from covey.data.rendering import encode_texts
    from covey.data.rows import load_rows
    from covey.data.settings import load_settings
    from covey.data.workers import load_tokenizer

    config, _ = load_settings(settings)
    few = Path(settings).with_name("few.jsonl")
    make_rows(few, 10)
    start = config.model_copy(update={"input": str(few)})
    preprocess(start)  # imports
    start_cpu, start_wall, _ = _timed(start)
    cpu, wall, report = _timed(config)
    cpu, wall = cpu - start_cpu, wall - start_wall
    usage = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    tokenizer = load_tokenizer(config.tokenizer_name_or_path)
    sample = load_rows(str(config.input), limit=2000).table
    texts = [sample["problem"].to_pylist(), sample["answer"].to_pylist()]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    bare = _cpu_s()
    for column in texts:
        encode_texts(tokenizer, column)
    bare = _cpu_s() - bare
    return {
        "rows": report["rows_out"],
        "tokens_per_row": report["prompt_length"]["mean"] + report["response_length"]["mean"],
        "processes": report["processes"],
        "threads": report["threads"],
        "wall_s": round(wall, 2),
        "cpu_s": round(cpu, 2),
        "rows_per_wall_s": round(report["rows_out"] / wall),
        "rows_per_core_s": round(report["rows_out"] / cpu),
        "tokenizer_alone_rows_per_core_s": round(sample.num_rows / bare),
        "peak_parent_mib": usage[0] // 1024,
        "peak_worker_mib": usage[1] // 1024,
    }


def _timed(config: PreprocessConfig) -> tuple[float, float, dict[str, Any]]:
    """CPU seconds, wall seconds, report."""
    from covey.data.preprocess import preprocess

    cpu, wall = _cpu_s(), time.monotonic()
    report = preprocess(config)
    return _cpu_s() - cpu, time.monotonic() - wall, report


def _cpu_s() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def main() -> None:
    """Print one JSON object a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one)))
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        small = directory / "small.jsonl"
        make_rows(small, min(args.rows, 10000))
        tokenizer = args.tokenizer
        if tokenizer is None:
            tokenizer = directory / "tokenizer"
            make_tokenizer(tokenizer, small)
        if args.memory:
            print(json.dumps(measure(directory, small, tokenizer, 1)), flush=True)
        large = directory / "large.jsonl"
        make_rows(large, args.rows)
        for workers in [os.cpu_count() or 1] if args.memory else sorted({1, os.cpu_count() or 1}):
            print(json.dumps(measure(directory, large, tokenizer, workers)), flush=True)


if __name__ == "__main__":
    main()
