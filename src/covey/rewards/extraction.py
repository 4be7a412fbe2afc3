r"""Find the final answer in a text: `\boxed{}`, `<answer>`, "#### 42", "Answer: 42".

The order in which they are tried, and that the last occurrence counts, is part of the definition: a response that
offers several answers is judged by its last box. The reference answer goes through the same function, because data
may store it with its reasoning (`<think>..</think><answer>\boxed{78.54}</answer>`, or GSM8K's `... #### 42`).
"""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+(?=\S)")
_JOINT = re.compile(r"(?:[\s,;$&]|\\quad|\\[()\[\] ]|\\text\s*\{\s*(?:and|or)\s*\}|and|or){1,20}")
_ANSWER_BLOCK = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*(.+)")
_ANSWER_LINE = re.compile(r"(?i)\banswer\s*(?:is|:)\s*:?\s*(.+)")


def extract_answer(text: str) -> str | None:
    r"""The final answer stated in `text`, or None.

    Looks in the last `<answer>` block first (its box if it has one, else the block); without a block, for the last
    `\boxed{}`, the last `####` line, then the last "Answer:" or "answer is" line.
    """
    blocks = _ANSWER_BLOCK.findall(text)
    if blocks:
        inside = blocks[-1].strip()
        boxed = last_boxed(inside)
        return (boxed if boxed is not None else inside) or None
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed or None
    for pattern in (_HASHES, _ANSWER_LINE):
        found = pattern.findall(text)
        if found:
            return _trim_sentence(found[-1]) or None
    return None


def extract_reference(text: object) -> str:
    """The reference answer as text: what extract_answer finds, else the whole of it (data often stores it bare)."""
    whole = str(text).strip()
    found = extract_answer(whole)
    return whole if found is None else found


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{...}`, with nested braces; None when there is none that closes.

    Boxes that only a comma, "and" or "or" separates are one answer: `\boxed{1} and \boxed{2}` is "1, 2".
    """
    answers: list[str] = []
    begin_of_next = len(text)
    for match in reversed(list(_BOX.finditer(text))):
        if text[match.end()] != "{":
            content, end = re.split(r"[\s$]", text[match.end() :], maxsplit=1)[0], match.end()
        else:
            closing = _closing_brace(text, match.end())
            if closing is None:
                continue
            content, end = text[match.end() + 1 : closing].strip(), closing + 1
        if answers and not _JOINT.fullmatch(text, end, begin_of_next):
            break
        answers.insert(0, content)
        begin_of_next = match.start()
    return ", ".join(answers) if answers else None


def braces_pair_up(text: str) -> bool:
    r"""Whether every brace of `text` has its partner: not in `\boxed{18}}}`. `\{` and `\}` are literal braces."""
    depth = 0
    for brace in re.findall(r"\\.|([{}])", text, re.DOTALL):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one at `start`; `\\{` and `\\}` are literal braces."""
    depth = 0
    position = start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position
        position += 1
    return None


def _trim_sentence(line: str) -> str:
    """`$42$.` -> `42`: the markup and the full stop around an answer at the end of a sentence."""
    line = line.strip().strip("*").strip()
    line = line.rstrip(".").strip()
    if line.startswith("$") and line.endswith("$") and len(line) > 1:
        line = line.strip("$").strip()
    return line
