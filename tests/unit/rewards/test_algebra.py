r"""Equality of final answers by algebra.

The pairs are written anew after the behaviours that math-verify 0.9's own tests expect (notations, units, percent,
expressions, relations, sets, intervals, matrices, words), with the tolerance of this project.
"""

from __future__ import annotations

import pytest

from covey.rewards.algebra import same_answer

PAIRS = [
    # numbers and their notations
    ("-5", "-5", True),
    ("7425000", "7,425,000", True),
    ("1000", "1 000", True),
    ("1000", "1000.0", True),
    ("1000.99", "1,000.99", True),
    ("0.4", ".4", True),
    ("1000.99", "1,000.99€", True),
    ("16386.20", r"16,\!386.20", True),
    ("10/9", r"\frac{10}{9}", True),
    ("1/3", r"\frac13", True),
    ("1", r"\frac3{3}", True),
    ("1/3", r"\cfrac{1}{3}", True),
    ("1/3", r"\left( \frac{1}{3} \right)", True),
    (r"\sqrt{3}", r"\sqrt3", True),
    ("10", "(9+1)", True),
    ("2", "2.5", False),
    (r"\frac{1}{12}", "0.0833333333333333", True),
    ("2", r"\frac{1+\sqrt{5}}{2}", False),
    (r"1\sqrt{19}", "1", False),
    ("1.2 \\cdot 10^{-3}", "0.0012", True),
    ("2^{10}", "1024", True),
    (r"\frac{9}{4}\pi", r"\frac94\pi", True),
    (r"\pi", "3.1416", True),
    (r"\pi", "3.2", False),
    (r"\sqrt{2}", "1.4142", True),
    (r"\sqrt{2}", "1.5", False),
    # units, currency, degrees
    (r"1/3", r"\frac{1}{3} \text{ meters}", True),
    (r"15\mbox{ cm}^2", "15", True),
    (r"90^\circ", "90", True),
    (r"125", r"125\textnormal{ miles}", True),
    ("1000.99", "$1,000.99$", True),
    (r"0.06 \text{ yuan}", "0.06", True),
    # percent
    (r"28\%", "28 percent", True),
    (r"28\%", "28 pct", True),
    (r"28\%", "28", True),
    ("0.28", "28", False),
    ("28/100", "28", False),
    ("28", "28/100", False),
    ("0.28", r"28\%", True),
    # expressions
    ("2-2p", "2(1-p)", True),
    (r"\frac{x+2}{7}", r"\frac{x}{7}+\frac{2}{7}", True),
    (r"\tan^2(y)+1", r"\sec^2(y)", True),
    ("(a+5)(b+2)", "(+5)(b+2)", False),
    ("x+2n+1", "x+1", False),
    (r"2 \sin b \cos a", r"2\cos a\sin b", True),
    (r"\frac{\pi r}{h+r}", r"\frac{r\pi}{r+h}", True),
    ("f(x)", "f(y)", False),
    (r"3\sqrt{13}", r"\sqrt{117}", True),
    # relations
    ("x = 11", "x = 5+5+1 = 11", True),
    ("11", "x=11", True),
    ("k=1", "1", True),
    ("2x+z=1", "1", False),
    ("x > 5", "x < 5", False),
    (r"x \leq 5", r"5 \geq x", True),
    ("x < 1", "-x > -1", True),
    ("34x+45y-20z+100=0", "-34x-45y+20z-100=0", True),
    ("x-2y+z-1=0", "x-2y+z=1", True),
    ("7 = 11a+c", "11a+c", False),
    # sets, tuples, intervals, matrices
    ("[0,1)", "[0,1)", True),
    ("[0,9)", "[0,1)", False),
    ("(0,9)", "[0,9)", False),
    (r"\{1,2,3\}", r"\{3,2,1\}", True),
    (r"\{1,2\}", r"\{1,3\}", False),
    ("-2,1", "1,-2", True),
    ("(3,1)", "(1,3)", False),
    (r"(3, \frac{\pi}{2})", r"(3,\pi/2)", True),
    (r"(1,\frac{9}{2})", "(1,4.5)", True),
    (r"[-1,0) \cup (1,\infty)", r"[-1, 0)\cup(1, \infty)", True),
    ("(p,q)=(3,2)", "(3,2)", True),
    (r"1 \pm \sqrt{19}", r"1 \pm \sqrt{19}", True),
    (r"x \in [-2,7]", "[-2,7]", True),
    (r"\begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix}", r"\begin{bmatrix}1 & 2 \\ 3 & 4\end{bmatrix}", True),
    (r"\begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix}", r"\begin{pmatrix}1 & 2 \\ 3 & 5\end{pmatrix}", False),
    ("0<f(x)<1", "(0,1)", True),
    (r"6 \text{ and } 8", "6,8", True),
    ("11:21", "11:21", True),
    (r"V_1:V_2=11:21", "11:21", True),
    # words
    (r"\text{Evelyn}", "Evelyn", True),
    (r"\text{Even}", "even", True),
    ("A", "(A)", True),
    ("A", r"\text{A}", True),
    ("A", "B", False),
    ("Paris", "Sapir", False),
    (r"\text{yes}", "no", False),
    ("204_5", "204_5", True),
]


@pytest.mark.parametrize(("reference", "answer", "equal"), PAIRS)
def test_same_answer(reference: str, answer: str, equal: bool) -> None:
    assert same_answer(answer, reference) is equal


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\\frac{",
        "{",
        "}{",
        "\\boxed",
        "$$",
        "__import__('os').getcwd()",
        "x" * 5000,
        "(" * 300,
        "1+" * 300 + "1",
        "-" * 900,
    ],
)
def test_no_answer_is_merely_wrong(text: str) -> None:
    assert same_answer(text, "4") is False


def test_text_is_not_run_as_python() -> None:
    import os

    before = dict(os.environ)
    same_answer(
        "__import__('os').putenv('COVEY_PWNED', '1') or __import__('os').environ.update(COVEY_PWNED='1')", "x+1"
    )
    assert dict(os.environ) == before
