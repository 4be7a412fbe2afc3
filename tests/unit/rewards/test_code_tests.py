"""Programs against tests. Everything that runs a program runs it in the sandbox."""

from __future__ import annotations

import json
from typing import Any

import pytest

from covey.rewards.code_tests import RowTests, code_reward, extract_program, read_tests, same_output
from covey.rewards.sandbox import find_bwrap

needs_sandbox = pytest.mark.skipif(find_bwrap() is None, reason="bubblewrap is not installed")


def score(program: str, row: dict[str, Any], **options: Any) -> dict[str, float]:
    value = code_reward([program], [row], options)[0]
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("```py\nx = 1\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("first\n```python\nx = 1\n```\nbetter\n```python\nx = 2\n```\n", "x = 2"),
        ("<think>```python\nx = 1\n```</think><answer>```python\nx = 2\n```</answer>", "x = 2"),
        ("<think>```python\nx = 1\n```</think>\n```python\nx = 2\n```", "x = 2"),
        ("```python\nx = 1", "x = 1"),  # cut off
        ("x = 1", "x = 1"),
        ("<think>hm</think><answer>x = 1</answer>", "x = 1"),
        ("<think>hm</think>", None),
        ("", None),
        ("```python\n```", None),
    ],
)
def test_program_of_a_response(response: str, program: str | None) -> None:
    assert extract_program(response) == program


def test_three_forms_of_tests() -> None:
    lines = read_tests({"test_list": ["assert f(1) == 2", "assert f(2) == 3"], "test_setup_code": "y = 1"})
    assert lines == RowTests((("y = 1", False), ("assert f(1) == 2", True), ("assert f(2) == 3", True)))
    check = read_tests({"test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"})
    assert check.statements[-1] == ("check(f)", True)
    assert check.num_tests == 1
    pairs = RowTests(inputs=("1", "2\n3"), outputs=("2", "5"))
    assert read_tests({"tests": {"inputs": ["1", ["2", "3"]], "outputs": ["2", "5"]}}) == pairs
    assert read_tests({"tests": [{"input": "1", "output": "2"}, {"input": "2\n3", "output": "5"}]}) == pairs
    assert read_tests({"response": json.dumps({"inputs": ["1", "2\n3"], "outputs": ["2", "5"]})}) == pairs


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "x"}, r"no tests in tests, test, test_list, response; its columns: \['problem'\]"),
        ({"tests": "x = 1"}, "neither an assert nor a check function"),
        ({"tests": "def check(candidate):\n    assert candidate(1)"}, "entry_point"),
        ({"tests": "assert f("}, "no Python"),
        ({"tests": "{inputs: 1}"}, "look like JSON and are none"),
        ({"tests": 5}, "none of the known forms"),
    ],
)
def test_row_without_usable_tests_says_why(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tests(row)


def test_outputs_are_compared_line_by_line() -> None:
    assert same_output("1 \n2\n\n", "1\n2")
    assert not same_output("1 2", "1\n2")
    assert not same_output("", "1")


PROGRAM = "```python\ndef f(x):\n    if x > 10:\n        raise ValueError('too large')\n    return x * x\n```"


@needs_sandbox
def test_all_tests_or_nothing_unless_partial() -> None:
    row = {"tests": ["assert f(2) == 4", "assert f(3) == 10", "assert f(0) == 0", "assert f(11)"]}
    assert score(PROGRAM, row) == {"score": 0.0, "passed": 0.5, "program": 1.0, "limit": 0.0}
    assert score(PROGRAM, row, partial=True)["score"] == 0.5
    assert score(PROGRAM, {"tests": "assert f(2) == 4\nassert f(-1) == 1"})["score"] == 1.0
    assert score("no code here", row)["passed"] == 0.0
    assert score("", row) == {"score": 0.0, "passed": 0.0, "program": 0.0, "limit": 0.0}


@needs_sandbox
def test_tests_may_use_python_as_they_like() -> None:
    program = """
import collections, fractions

class Counter:
    def __init__(self, start): self.n = start
    def add(self, k): self.n += k; return self
    def __len__(self): return self.n

def sort(items): items.sort()
def pairs(n): return [(i, {i: i}) for i in range(n)]
def gen(n):
    for i in range(n): yield i
def raises(): raise KeyError('k')
def third(): return fractions.Fraction(1, 3)
def counts(s): return collections.Counter(s)
def big(): return 10 ** 50
LIMIT = 7
"""
    tests = """
import math
from fractions import Fraction
assert LIMIT == 7
x = [3, 1, 2]
sort(x)
assert x == [1, 2, 3]
assert pairs(2) == [(0, {0: 0}), (1, {1: 1})]
assert list(gen(3)) == [0, 1, 2]
assert sum(gen(4)) == 6
assert third() == Fraction(1, 3)
assert counts('aab') == {'a': 2, 'b': 1}
assert big() == 10 ** 50
c = Counter(2)
assert c.add(3).n == 5
assert len(c) == 5
def expect_key_error():
    try:
        raises()
    except KeyError:
        return True
assert expect_key_error()
assert math.isclose(third(), 1 / 3)
"""
    assert score(program, {"tests": tests}) == {"score": 1.0, "passed": 1.0, "program": 1.0, "limit": 0.0}


@needs_sandbox
def test_function_named_like_a_builtin_needs_to_be_the_entry_point() -> None:
    program = "def sum(a, b):\n    return a + b"
    assert score(program, {"tests": ["assert sum(1, 2) == 3"]})["passed"] == 0.0
    assert score(program, {"tests": ["assert sum(1, 2) == 3"], "entry_point": "sum"})["passed"] == 1.0


@needs_sandbox
def test_program_reads_input_and_prints() -> None:
    row = {"tests": {"inputs": ["2\n3", "10\n20", "x\n1"], "outputs": ["5", "30", "error"]}}
    program = "if __name__ == '__main__':\n    print(int(input()) + int(input()))"
    assert score(program, row, partial=True)["score"] == pytest.approx(2 / 3)


@needs_sandbox
def test_hang_fails_its_test_and_is_named() -> None:
    row = {"tests": ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 3"]}
    program = "def f(x):\n    while x == 2:\n        pass\n    return x"
    parts = score(program, row, partial=True, test_s=0.5)
    assert parts["score"] == pytest.approx(1 / 3)  # the program is gone after the hang
    assert parts["limit"] == 1.0


@needs_sandbox
def test_test_that_hands_a_function_over_is_an_error() -> None:
    with pytest.raises(ValueError, match="passes a function, which cannot be sent"):
        score("def f(g):\n    return g(1)", {"tests": ["assert f(lambda x: x) == 1"]})


@needs_sandbox
def test_prefix_completes_a_body() -> None:
    row = {"prompt": "def f(x):\n", "test": "def check(candidate):\n    assert candidate(2) == 4", "entry_point": "f"}
    assert score("    return x * x", row, prefix_column="prompt")["score"] == 1.0
    assert score("def f(x):\n    return x * x", row, prefix_column="prompt")["score"] == 1.0


def test_unknown_option_and_limit_are_refused() -> None:
    with pytest.raises(ValueError, match="'partail' is unknown: did you mean 'partial'"):
        code_reward([], [], {"partail": True})
    with pytest.raises(ValueError, match=r"'wall' is unknown.*wall_s"):
        code_reward([], [], {"limits": {"wall": 3}})
