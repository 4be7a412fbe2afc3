"""Reward workers and `covey preprocess` start without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"


@pytest.mark.parametrize("package", ["config", "data", "rewards", "types.py", "cli.py", "metrics.py"])
def test_import_loads_no_torch(package: str):
    path = SOURCE / "covey" / package
    files = [path] if path.suffix else sorted(path.rglob("*.py"))
    modules = [".".join(file.relative_to(SOURCE).with_suffix("").parts) for file in files]
    assert modules
    code = (
        f"import sys, importlib\nfor name in {modules}:\n    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} imports torch, directly or through another module'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]
