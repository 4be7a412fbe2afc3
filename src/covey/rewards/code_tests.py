"""The `code` reward: run the program in a response against the row's tests, in the sandbox.

Tests come in three forms, recognised by their shape:

assert lines    text, or a list of texts: each top-level `assert` is one test, other statements set them up (MBPP)
check function  text that defines `check(candidate)`; the row's `entry_point` names the function under test (HumanEval)
stdin, stdout   {"inputs": [...], "outputs": [...]}, a list of {"input", "output"}, or either as JSON text (APPS)

A data file has one type per column, so rows with tests of different forms hold them all as text.

A program that is missing, crashes, hangs or exceeds a limit fails its tests: that is its score, not an error of the
reward. Tests that cannot be run (no tests, a test that needs to hand a function to the program) are errors.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from covey.rewards.base import Score, read_options
from covey.rewards.sandbox import Result, Sandbox, limits_from

_FENCE = re.compile(r"```(?:python3?|py|Python)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_COLUMNS = ("tests", "test", "test_list", "response")
_OPTIONS = {
    "sandbox": "isolated",
    "tests_column": None,
    "partial": False,
    "test_s": 2.0,
    "limits": {},
    "prefix_column": None,
}


@dataclass(frozen=True)
class RowTests:
    """The tests of a row. Example: RowTests(statements=(("assert add(1, 2) == 3", True),))."""

    statements: tuple[tuple[str, bool], ...] = ()  # (source, whether it is a test), in order
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    entry_point: str = ""

    @property
    def num_tests(self) -> int:
        """How many verdicts a full run gives."""
        return len(self.inputs) or sum(is_test for _, is_test in self.statements)


@dataclass
class Verdicts:
    """What a run found."""

    passed: int = 0
    reasons: list[str] = field(default_factory=list)  # of tests that failed and of what ended the run


def code_reward(responses: list[str], rows: list[dict[str, Any]], config: dict[str, Any]) -> list[Score]:
    """1.0 when the program passes every test of its row, else 0.0; the part `passed` is the share that it passes.

    Options: `partial` (score is the share passed), `tests_column` (default: the first of tests, test, test_list,
    response that the row has), `prefix_column` (put before a program that does not define the entry point itself),
    `test_s` (time limit per test, seconds), `limits` (fields of sandbox.Limits), `sandbox` (default: reward.sandbox).
    """
    options = read_options(config, _OPTIONS)
    limits, sandbox = limits_from(options["limits"]), _sandbox(options["sandbox"])
    scores: list[Score] = []
    for response, row in zip(responses, rows, strict=True):
        tests = read_tests(row, options["tests_column"])
        program = extract_program(response)
        if program is None:
            scores.append({"score": 0.0, "passed": 0.0, "program": 0.0, "limit": 0.0})
            continue
        prefix = row.get(options["prefix_column"]) if options["prefix_column"] else None
        if prefix and f"def {tests.entry_point}" not in program:
            program = f"{prefix}{program}"
        verdicts, result = run_tests(sandbox, program, tests, test_s=options["test_s"], limits=limits)
        share = verdicts.passed / tests.num_tests
        score = share if options["partial"] else float(share == 1.0)
        limit = float(bool(result.limit) or any("limit" in reason for reason in verdicts.reasons))
        scores.append({"score": score, "passed": share, "program": 1.0, "limit": limit})
    return scores


def extract_program(response: str) -> str | None:
    """The last fenced block of the answer, or the whole answer when nothing is fenced; None when it is empty.

    The answer is the `<answer>` block when there is one, else what follows `</think>`, else everything.
    """
    answer = re.findall(r"<answer>(.*?)(?:</answer>|\Z)", response, re.DOTALL)
    text = answer[-1] if answer else response.rsplit("</think>", 1)[-1]
    blocks = _FENCE.findall(text)
    program = blocks[-1] if blocks else text
    return program.rstrip() if program.strip() else None


def read_tests(row: dict[str, Any], column: str | None = None) -> RowTests:
    """The row's tests; ValueError when it has none, or they have none of the known forms."""
    names = [column] if column else [name for name in _COLUMNS if row.get(name)]
    value = row.get(names[0]) if names else None
    if not value:
        raise ValueError(f"the row has no tests in {column or ', '.join(_COLUMNS)}; its columns: {sorted(row)}")
    if isinstance(value, str) and value.lstrip()[:1] in "{[":
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"the tests look like JSON and are none: {error}") from None
    entry_point = str(row.get("entry_point") or "")
    if isinstance(value, dict) and {"inputs", "outputs"} <= value.keys():
        return _pairs(list(zip(value["inputs"], value["outputs"], strict=True)), entry_point)
    if isinstance(value, list) and all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in value):
        return _pairs([(test["input"], test["output"]) for test in value], entry_point)
    if isinstance(value, list) and all(isinstance(test, str) for test in value):
        value = "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"tests of type {type(value).__name__} have none of the known forms")
    setup = "\n".join([*(row.get("test_imports") or []), str(row.get("test_setup_code") or "")])
    return _statements(f"{setup}\n{value}", entry_point)


def run_tests(
    sandbox: Sandbox, program: str, tests: RowTests, *, test_s: float, limits: Any = None
) -> tuple[Verdicts, Result]:
    """Run `program` against all tests in one sandbox; ValueError when the tests themselves cannot be run."""
    nonce = secrets.token_hex(16)
    limits = limits or limits_from({})
    task: dict[str, Any] = {"nonce": nonce, "program": program, "entry_point": tests.entry_point, "test_s": test_s}
    if tests.inputs:
        task |= {"inputs": tests.inputs, "output_bytes": limits.output_bytes // (len(tests.inputs) + 1)}
        result = sandbox.run(task, mode="stdio", limits=limits)
    else:
        result = sandbox.run({**task, "tests": tests.statements}, mode="calls", limits=limits)
    verdicts = Verdicts(reasons=[f"{result.limit} limit"] if result.limit else [])
    for line in result.output.splitlines():
        verdict = _read_verdict(line, nonce)
        if "unsupported" in verdict:
            raise ValueError(verdict["unsupported"])
        if "output" in verdict:
            expected = tests.outputs[verdict["test"]]
            passed = not verdict["why"] and same_output(verdict["output"], expected)
            verdict = {**verdict, "passed": passed, "why": verdict["why"] or "another output"}
        if verdict.get("passed"):
            verdicts.passed += 1
        elif verdict:
            verdicts.reasons.append(verdict.get("why") or verdict.get("failure", ""))
    return verdicts, result


def same_output(output: str, expected: str) -> bool:
    """Equal line by line, without white space at the ends of lines and of the whole."""
    return [line.rstrip() for line in output.strip().splitlines()] == [
        line.rstrip() for line in expected.strip().splitlines()
    ]


@lru_cache(maxsize=4)
def _sandbox(level: str) -> Sandbox:
    """One sandbox per process: making it includes finding out that it holds."""
    return Sandbox(level)


def _read_verdict(line: bytes, nonce: str) -> dict[str, Any]:
    """The judge's line, or {} for one that it did not write."""
    try:
        verdict = json.loads(line)
    except ValueError:
        return {}
    return verdict if isinstance(verdict, dict) and verdict.get("nonce") == nonce else {}


def _pairs(pairs: list[tuple[Any, Any]], entry_point: str) -> RowTests:
    texts = [tuple("\n".join(v) if isinstance(v, list) else str(v) for v in pair) for pair in pairs]
    return RowTests(inputs=tuple(t[0] for t in texts), outputs=tuple(t[1] for t in texts), entry_point=entry_point)


def _statements(source: str, entry_point: str) -> RowTests:
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"the tests are no Python: {error}") from error
    statements = [(ast.unparse(node), isinstance(node, ast.Assert)) for node in body]
    has_check = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body)
    if has_check and entry_point:
        statements.append((f"check({entry_point})", True))
    if not any(is_test for _, is_test in statements):
        raise ValueError("the tests hold neither an assert nor a check function with an entry_point")
    return RowTests(statements=tuple(statements), entry_point=entry_point)
