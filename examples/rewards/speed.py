"""How fast rewards are scored here: `python examples/rewards/speed.py`. Every response is different."""

from __future__ import annotations

import random
import time

from covey.config.schema import RewardConfig
from covey.rewards.runner import Scorer
from covey.types import Group, Prompt, Response

RNG = random.Random(0)
WORDS = [
    "the",
    "value",
    "of",
    "x",
    "equals",
    "so",
    "we",
    "add",
    "multiply",
    "then",
    "compute",
    "next",
    "therefore",
    "since",
    "because",
    "sum",
    "product",
    "area",
]
GOLD = [r"\frac{3}{4}", "78.54", "x^2+2x+1", r"\sqrt{2}", "12", "(1,2)", r"\frac{\pi}{3}", "[0,1)"]


def math_response(number: int, gold: str) -> str:
    """About 500 tokens of reasoning, and an answer that is right one time in five."""
    steps = []
    for k in range(15):
        a, b = RNG.randint(1, 99), RNG.randint(1, 99)
        steps.append(f"Step {k}: {' '.join(RNG.choices(WORDS, k=12))} {a} + {b} = {a + b}.")
    wrong = [str(number), f"\\frac{{{number}}}{{{RNG.randint(2, 9)}}}", f"{number}\\sqrt{{{RNG.randint(2, 7)}}}"]
    answer = RNG.choice([gold, *wrong, f"x+{number}"])
    return f"<think>{chr(10).join(steps)}</think><answer>\\boxed{{{answer}}}</answer>"


def measure(name: str, what: str, groups: list[Group]) -> None:
    """Score twice: warm workers, then from the cache."""
    scorer = Scorer(RewardConfig.model_validate({"functions": [name], "num_workers": 2}))
    scorer.ready()
    scorer.score([Group(Prompt(-1, [0], "", groups[0].prompt.row), [Response([0], [0.0], r"\boxed{x+1}")] * 2)])
    for state in ("warm", "cached"):
        begin = time.perf_counter()
        scores = scorer.score(groups)
        print(f"{what}, {state}: {time.perf_counter() - begin:.2f} s, mean {scores.total.mean():.3f}, {scores.counts}")
    scorer.close()


def group(index: int, row: dict[str, object], texts: list[str]) -> Group:
    """A prompt with the given responses."""
    return Group(Prompt(index, [0], "", row), [Response([0], [0.0], text) for text in texts])


def main() -> None:
    """1,024 math responses; 128 programs with five asserts each."""
    math = [
        group(p, {"response": GOLD[p % 8]}, [math_response(8 * p + g, GOLD[p % 8]) for g in range(8)])
        for p in range(128)
    ]
    measure("math", "1,024 math responses", math)
    code = []
    for p in range(16):
        programs = [f"def add(a, b):\n    # {8 * p + g}\n    return a + b + {int(g == 7)}" for g in range(8)]
        code.append(group(p, {"tests": [f"assert add({i}, {p}) == {i + p}" for i in range(5)]}, programs))
    measure("code", "128 programs with 5 asserts", code)


if __name__ == "__main__":
    main()
