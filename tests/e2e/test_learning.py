"""Training raises the held-out reward: the quick form of benchmarks/learning.py."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "learning.py"


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["grpo", "dapo", "gspo", "cispo"])
def test_held_out_reward_rises(preset: str, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("learning", FILE)
    assert spec is not None and spec.loader is not None
    learning = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(learning)
    before, after = learning.run(learning.VARIANTS[preset], tmp_path, steps=30, seed=1)
    assert before < 0.2
    assert after > before + learning.MARGIN
