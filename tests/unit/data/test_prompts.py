"""Prompts: ids made once by the tokenizer, drops counted, columns kept with their types, splits that never overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from covey.config.schema import DataConfig
from covey.data.prompts import PromptSet, build_prompts, count_shared, split_prompts
from covey.data.rows import Rows


def _rows(rows: list[dict[str, Any]]) -> Rows:
    return Rows(pa.Table.from_pylist(rows), "rows.jsonl")


def _build(rows: list[dict[str, Any]], tokenizer: Any, **keys: Any) -> PromptSet:
    return build_prompts(_rows(rows), tokenizer, DataConfig(train="rows.jsonl", **keys), source="rows.jsonl")


SAMPLE = {"problem": "2+2=", "answer": "<answer>\\boxed{4}</answer>", "task": "math", "labels": [1.0], "level": 3}


def test_a_row_keeps_every_column_with_its_type_beside_prompt_and_response(tokenizer: Any) -> None:
    prompt = _build([SAMPLE], tokenizer)[0]
    assert prompt.row == {**SAMPLE, "prompt": "2+2=", "response": SAMPLE["answer"]}
    assert isinstance(prompt.row["labels"][0], float)


def test_chat_ids_are_those_of_the_tokenizers_own_template(tokenizer: Any) -> None:
    prompt = _build([SAMPLE], tokenizer, system="Be brief.")[0]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2="}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt.input_ids == expected
    assert (
        prompt.text
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n"
    )


def test_empty_is_the_raw_text_without_special_tokens(tokenizer: Any) -> None:
    prompt = _build([SAMPLE], tokenizer, prompt_type="empty")[0]
    assert prompt.input_ids == tokenizer.encode("2+2=", add_special_tokens=False)


def test_auto_falls_back_to_empty_and_chat_refuses_when_there_is_no_chat_template(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert _build([SAMPLE], tokenizer).prompt_type == "empty"
    with pytest.raises(ValueError, match="needs a chat template, and this tokenizer has none"):
        _build([SAMPLE], tokenizer, prompt_type="chat")


def test_messages_are_rendered_whole_and_a_last_assistant_turn_is_the_reference(tokenizer: Any) -> None:
    turns = [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    row = {"problem": [{"role": role, "content": content} for role, content in turns]}
    prompt = _build([row], tokenizer, response_key=None)[0]
    assert prompt.input_ids == tokenizer.apply_chat_template(
        row["problem"][:-1], add_generation_prompt=True, return_dict=False
    )
    assert (prompt.row["prompt"], prompt.row["response"]) == ("c", "d")


def test_empty_and_long_prompts_are_dropped_and_counted(tokenizer: Any) -> None:
    texts = ["ok", "", None, "   ", "1" * 50, "12"]
    prompts = _build(
        [{"problem": t, "answer": "x"} for t in texts], tokenizer, prompt_type="empty", max_prompt_length=5
    )
    assert [p.text for p in prompts] == ["ok", "12"]
    assert prompts.drops == {"empty_prompt": 3, "too_long": 1}
    assert prompts.num_rows_read == 6


def test_a_prompt_of_exactly_the_limit_stays(tokenizer: Any) -> None:
    length = len(tokenizer.encode("abc", add_special_tokens=False))
    row = {"problem": "abc", "answer": ""}
    assert len(_build([row], tokenizer, prompt_type="empty", max_prompt_length=length)) == 1
    with pytest.raises(ValueError, match="none of its 1 rows is left"):
        _build([row], tokenizer, prompt_type="empty", max_prompt_length=length - 1)


def test_long_prompts_can_be_an_error_that_names_the_row(tokenizer: Any) -> None:
    rows = [{"problem": "ok", "answer": ""}, {"problem": "long " * 20, "answer": ""}]
    with pytest.raises(ValueError, match=r"rows.jsonl, row 2: the prompt has \d+ tokens.*overlong_prompts"):
        _build(rows, tokenizer, max_prompt_length=20, overlong_prompts="error")


def test_missing_columns_name_the_setting_and_the_nearest(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"data.prompt_key: 'problem' is not a column.*mean 'Problem'"):
        _build([{"Problem": "x", "answer": "y"}], tokenizer)
    with pytest.raises(ValueError, match=r"data.response_key.*'answer' is not a column"):
        _build([{"problem": "x", "labels": "y"}], tokenizer)


def test_raw_columns_with_our_names_are_kept_under_raw(tokenizer: Any) -> None:
    row = {"prompt": [{"role": "user", "content": "q"}], "response": 4, "input_ids": [9], "prompt_text": "mine"}
    got = _build([row], tokenizer, prompt_key="prompt", response_key="response")[0]
    assert (got.row["prompt"], got.row["response"]) == ("q", "4")
    assert {k: v for k, v in got.row.items() if k.startswith("raw_")} == {f"raw_{k}": v for k, v in row.items()}


def test_options_without_effect_and_templates_of_another_model_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="enable_thinking has no effect with prompt_type: qwen"):
        _build([SAMPLE], tokenizer, prompt_type="qwen", chat_template_options={"enable_thinking": True})
    with pytest.raises(ValueError, match=r"unknown template 'qwen_r2'.*mean 'qwen_r1'"):
        _build([SAMPLE], tokenizer, prompt_type="qwen_r2")


def test_a_stop_word_that_is_not_one_token_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _build([SAMPLE], tokenizer, prompt_type="qwen").stop_token_ids == [
        tokenizer.convert_tokens_to_ids("<|im_end|>")
    ]
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **k: encode(text.replace("|", "!"), **k))
    with pytest.raises(ValueError, match=r"'<\|im_end\|>', which is \d+ tokens.*for another model"):
        _build([SAMPLE], tokenizer, prompt_type="qwen")


def test_a_chat_template_that_refuses_names_the_row(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no system role') }}")
    with pytest.raises(ValueError, match="refuses this conversation: no system role"):
        _build([SAMPLE], tokenizer)


def test_the_last_rows_are_held_out_and_never_share_a_prompt_with_training(tokenizer: Any) -> None:
    rows = [{"problem": text, "answer": str(i)} for i, text in enumerate(["a", "b", "c", "b", "d"])]
    training, held_out = split_prompts(_build(rows, tokenizer), 2)
    assert [p.row["answer"] for p in held_out] == ["3", "4"]
    assert [p.row["answer"] for p in training] == ["0", "2"]  # row 1 asks "b", which is held out
    assert training.drops["also_held_out"] == 1
    assert count_shared(training, held_out) == 0
    with pytest.raises(ValueError, match="leaves no training rows"):
        split_prompts(training, 2)


def test_rows_shared_with_a_separate_held_out_set_are_counted(tokenizer: Any, write_jsonl: Callable[..., str]) -> None:
    one = _build([{"problem": t, "answer": ""} for t in "abca"], tokenizer)
    other = _build([{"problem": t, "answer": ""} for t in "az"], tokenizer)
    assert count_shared(one, other) == 2


def test_more_rows_than_a_batch_keep_their_order_and_lengths(tokenizer: Any) -> None:
    rows = [{"problem": str(i), "answer": str(i)} for i in range(2300)]
    prompts = _build(rows, tokenizer, prompt_type="empty")
    assert [p.text for p in prompts] == [str(i) for i in range(2300)]
    assert prompts.lengths.tolist() == [len(p.input_ids) for p in prompts]
    assert prompts.fingerprint != _build(rows[::-1], tokenizer, prompt_type="empty").fingerprint
