"""What is asked and answered in rows of every shape, worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covey.data.handlers import HANDLERS, AlpacaStyleInstructionHandler, find_handler
from covey.data.rendering import Renderer

ROOT = Path(__file__).resolve().parents[3]


def _handler(tokenizer: Any, name: str, map_keys: dict[str, str | None] | None = None) -> AlpacaStyleInstructionHandler:
    return HANDLERS[name](map_keys, tokenizer, Renderer(tokenizer, "empty"))


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_alpaca_joins_instruction_and_input_and_keeps_the_assistants_turns(tokenizer: Any) -> None:
    row = {
        "instruction": "and now?",
        "input": "x=2",
        "output": "4",
        "past": [["hello", "hi there"], ["1+1", "2"]],
        "sys": "Be brief.",
    }
    default = {"prompt": "instruction", "query": "input", "response": "output"}
    handler = _handler(tokenizer, "AlpacaStyleInstructionHandler", {**default, "history": "past", "system": "sys"})
    got = handler.conversation(row)
    assert got.messages == [
        _user("hello"), _assistant("hi there"), _user("1+1"), _assistant("2"), _user("and now?\nx=2"),
    ]  # fmt: skip
    assert (got.system, got.response, got.question) == ("Be brief.", "4", "and now?\nx=2")


def test_an_empty_mapping_and_an_empty_query_are_absent(tokenizer: Any) -> None:
    handler = _handler(tokenizer, "R1AlpacaStyleInstructionHandler", {"prompt": "problem", "query": "q", "system": ""})
    got = handler.conversation({"problem": "2+2=", "q": "", "answer": "4"})
    assert (got.messages, got.system, got.response) == ([_user("2+2=")], None, None)


def test_responses_that_are_lists_or_numbers_become_text(tokenizer: Any) -> None:
    handler = _handler(tokenizer, "R1AlpacaStyleInstructionHandler", {"prompt": "p", "response": "r"})
    values = [["first", "second"], 7, 0.5, [], None, ""]
    assert [handler.conversation({"p": "x", "r": v}).response for v in values] == ["first", "7", "0.5", None, None, ""]


def test_math17k_reads_messages_and_the_ground_truth(tokenizer: Any) -> None:
    row = {"prompt": [_user("Solve x.")], "reward_model": {"ground_truth": "34", "style": "rule"}}
    got = _handler(tokenizer, "Math17kAlpacaStyleInstructionHandler").conversation(row)
    assert (got.messages, got.response) == ([_user("Solve x.")], "34")


def test_sharegpt_keeps_all_turns_and_takes_the_last_answer_as_reference(tokenizer: Any) -> None:
    turns = [("system", "S"), ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns]}
    handler = _handler(tokenizer, "SharegptStyleInstructionHandler")
    handler.check_columns(["conversations"], source="f")
    got = handler.conversation(row)
    assert got.messages == [_user("a"), _assistant("b"), _user("c")]
    assert (got.system, got.response) == ("S", "d")


def test_chat_messages_may_have_text_parts_and_nothing_else(tokenizer: Any) -> None:
    handler = _handler(tokenizer, "ChatTemplateHandler")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert handler.conversation({"messages": [{"role": "user", "content": parts}]}).question == "ab"
    with pytest.raises(ValueError, match="Only text is trained"):
        handler.conversation({"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]})
    with pytest.raises(ValueError, match="has the role 'critic'"):
        handler.conversation({"messages": [{"role": "critic", "content": ""}]})


@pytest.mark.parametrize(
    ("map_keys", "expected"),
    [
        ({"prompt": "problem"}, r"map_keys.prompt: 'problem' is not a column of f.jsonl.*mean 'Problem'"),
        ({"promt": "Problem"}, r"map_keys.promt: unknown target.*mean 'prompt'"),
        ({"prompt": "Problem", "chosen": "a"}, "preference pairs .* not for GRPO"),
        ({"response": "answer"}, r"nothing is mapped to 'prompt'"),
        (None, r"map_keys.prompt: 'instruction' is not a column"),
    ],
)
def test_wrong_maps_are_refused_with_the_nearest_name(
    tokenizer: Any, map_keys: dict[str, str | None] | None, expected: str
) -> None:
    handler = _handler(tokenizer, "R1AlpacaStyleInstructionHandler", map_keys)
    with pytest.raises(ValueError, match=expected):
        handler.check_columns(["Problem", "answer"], source="f.jsonl")


def test_default_columns_other_than_the_prompt_may_be_absent(tokenizer: Any) -> None:
    handler = _handler(tokenizer, "AlpacaStyleInstructionHandler")
    handler.check_columns(["instruction", "output"], source="f")
    assert handler.columns == {"prompt": "instruction", "response": "output"}


def test_a_users_handler_is_found_by_file_and_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_handler(f"{ROOT}/examples/handlers/task_aware.py:TaskAwareInstructionHandler")
    assert issubclass(found, HANDLERS["R1AlpacaStyleInstructionHandler"])
    (tmp_path / "my_rows.py").write_text(
        "from covey.data.handlers import AlpacaStyleInstructionHandler\nclass Mine(AlpacaStyleInstructionHandler):\n"
        "    '''Mine.'''\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert find_handler("my_rows:Mine").__name__ == "Mine"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("R1AlpacaStyleInstructionHandlr", r"unknown handler.*Did you mean 'R1AlpacaStyleInstructionHandler'"),
        ("AlpacaStylePairwiseHandler", "preference pairs"),
        ("no_such_module:Mine", "cannot import 'no_such_module'"),
        ("no/such.py:Mine", "no/such.py does not exist"),
        ("covey.data.handlers:Conversation", "must subclass a handler"),
        ("covey.data.handlers:Nothing", "has no handler class 'Nothing'"),
    ],
)
def test_unknown_handlers_are_refused_with_what_to_do(name: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        find_handler(name)
