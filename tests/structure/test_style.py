"""Rules of CONTRIBUTING.md that ruff does not know. Every failure says what to change."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "covey"
FILES = sorted(SOURCE.rglob("*.py"))

MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 60
# A longer file: its own limit, and why it is not two.
LONG_FILES = {
    "config/schema.py": (600, "every setting of a run in one place, each with its docstring"),
    "models/attention.py": (450, "one function for three kinds of device, read against each other"),
    "loggers.py": (330, "one small class for each place where metrics go"),
    "rollout/native.py": (450, "one scheduler: its pieces share the state of the sequences in flight"),
    "trainer.py": (450, "the whole training step is read in one file"),
}
# Unit tests that belong to no single file.
ACROSS_FILES = {"algorithm/test_golden.py"}
# The only files that may tell devices apart.
DEVICE_FILES = {
    "device.py",
    "models/kernels.py",
    "models/ascend.py",  # torch_npu's kernels, apart from the rest because it imports torch_npu
    "tools/align/measures.py",  # a tolerance profile has a device in its name
    # What a host of one device must have: drivers, files, variables. They import no device.
    "tools/doctor/ascend.py",
    "tools/doctor/ascend_settings.py",
    "tools/doctor/nvidia.py",
}
DEVICE_WORD = re.compile(r"\b(cuda|npu|torch_npu|hccl|nccl)\b")


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def code_words(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every identifier, attribute, import and string that is not a docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield node.lineno, " ".join([getattr(node, "module", None) or "", *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


@pytest.mark.parametrize("path", FILES, ids=name)
def test_device_words_stay_in_their_files(path: Path):
    if name(path) in DEVICE_FILES or name(path).startswith("config/"):
        pytest.skip("may name devices")
    found = [f"{path}:{line}: {text!r}" for line, text in code_words(path) if DEVICE_WORD.search(text)]
    assert not found, "ask covey.device instead of naming a device:\n" + "\n".join(found)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_file_is_short(path: Path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    limit, _reason = LONG_FILES.get(name(path), (MAX_FILE_LINES, ""))
    assert lines <= limit, (
        f"{name(path)} has {lines} lines, over {limit}: split it by what it does, or give the reason in LONG_FILES"
    )


@pytest.mark.parametrize("path", FILES, ids=name)
def test_functions_are_short(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{path}:{node.lineno}: {node.name} has {lines} lines: split it"


def test_no_file_is_a_drawer_for_everything():
    found = [name(path) for path in FILES if path.stem in {"utils", "util", "common", "helpers", "misc"}]
    assert not found, f"{found}: name a file after what it does"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_suppressions_say_which_rule(path: Path):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        bare = re.search(r"# noqa(?!: [A-Z]+\d+)|# type: ignore(?!\[)|# pyright: ignore(?!\[)", line)
        assert not bare, f"{path}:{number}: name the rule that is suppressed"


def test_unit_tests_mirror_the_source():
    stray = []
    for path in sorted((ROOT / "tests" / "unit").rglob("test_*.py")):
        if path.relative_to(ROOT / "tests" / "unit").as_posix() in ACROSS_FILES:
            continue
        package = path.parent.relative_to(ROOT / "tests" / "unit").as_posix().removeprefix("core")
        words = path.stem.split("_")[1:]  # `test_sandbox_attacks` belongs to `sandbox`
        names = ["_".join(words[:end]) for end in range(1, len(words) + 1)]
        if not any((SOURCE / package / f"{name}.py").exists() for name in names):
            stray.append(path.relative_to(ROOT).as_posix())
    assert not stray, f"{stray}: tests/unit/<package>/test_<file>[_aspect].py tests src/covey/<package>/<file>.py"
