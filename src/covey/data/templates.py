"""Prompt templates by name: the texts around a question, and the stop words that end its answer.

The names and texts are those of MindSpeed-RL's `configs/model/templates.json` (MIT), in LLaMA-Factory's slot model:
every slot is tokenised on its own, without the tokenizer's special tokens, and the ids are joined. Turn 0 is
prefix + system + user; later user turns start with the separator. Tool schemas and function calls are left to `chat`,
the tokenizer's own template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from covey.data.rows import nearest_name

Message = dict[str, str]  # {"role": "user" | "assistant" | "tool", "content": text}

EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
THOUGHT = re.compile(r"<think>\n(.*?)\n</think>\n\n", re.DOTALL)


class Special(Enum):
    """A slot that stands for one of the tokenizer's special tokens."""

    BOS = "bos_token"
    EOS = "eos_token"


Slot = str | Special
CONTENT = "{{content}}"


@dataclass(frozen=True)
class Template:
    """One prompt_type. Example: Template("empty", user=("{{content}}",)) leaves the text as it is."""

    name: str
    user: tuple[Slot, ...] = (CONTENT,)
    assistant: tuple[Slot, ...] = (CONTENT, Special.EOS)
    system: tuple[Slot, ...] = (CONTENT,)
    observation: tuple[Slot, ...] | None = None  # a tool's answer; None: as user
    separator: tuple[Slot, ...] = ()
    prefix: tuple[Slot, ...] = ()
    default_system: str = ""
    stop_words: tuple[str, ...] = ()
    replace_eos: bool = False  # the first stop word stands for the tokenizer's eos
    reasoning: bool = False  # earlier thoughts are cut; enable_thinking=False adds an empty thought

    def slots(self, messages: Sequence[Message], system: str | None, *, enable_thinking: bool = False) -> list[Slot]:
        """The conversation up to the answer that is asked for, as texts and special tokens in order.

        Raises ValueError for a role other than user, assistant and tool (observation).
        """
        system = system or self.default_system
        out: list[Slot] = []
        for i, message in enumerate(messages):
            content = message["content"]
            if i == 0:
                out += self.prefix
                if system and self._system_in_user:
                    content = "".join(map(str, _fill(self.system, system))) + content
                elif system:
                    out += _fill(self.system, system)
            elif i % 2 == 0:
                out += self.separator
            if self.reasoning and message["role"] == "assistant":
                content = THOUGHT.sub("", content).lstrip("\n")
            out += _fill(self._slots_of(message["role"]), content)
        if self.reasoning and not enable_thinking:
            out.append(EMPTY_THOUGHT)
        return [slot for slot in out if slot != ""]

    @property
    def _system_in_user(self) -> bool:
        return self.name.startswith("llama2")

    def _slots_of(self, role: str) -> tuple[Slot, ...]:
        if role == "user":
            return self.user
        if role == "assistant":
            return self.assistant
        if role in ("tool", "observation"):
            return self.observation or self.user
        raise ValueError(
            f"role '{role}' has no place in the template '{self.name}' (user, assistant, tool). Use prompt_type: chat"
        )


def get_template(name: str, path: str | None = None) -> Template:
    """The template of a prompt_type, from a templates.json when `path` is given. Raises ValueError with known names."""
    known = load_templates(path) if path else TEMPLATES
    if name not in known:
        near = nearest_name(name, known)
        hint = f" Did you mean '{near}'?" if near else ""
        raise ValueError(f"prompt_type: unknown template '{name}'. Known: chat, {', '.join(sorted(known))}.{hint}")
    return known[name]


def load_templates(path: str) -> dict[str, Template]:
    """Templates of a file in the format of MindSpeed-RL's templates.json. Raises ValueError when it is not one."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        return {entry["name"]: _from_json(entry) for entry in entries}
    except FileNotFoundError as error:
        raise ValueError(
            f"prompt_type_path: {path} does not exist. Leave the key out to use the built-in templates"
        ) from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"prompt_type_path: {path} is not a list of templates ({error}). Each needs a name and slots"
        ) from error


def _from_json(entry: dict[str, Any]) -> Template:
    def slots(key: str, default: tuple[Slot, ...]) -> tuple[Slot, ...]:
        found = (entry.get(key) or {}).get("slots")
        return tuple(s if isinstance(s, str) else Special(s[0]) for s in found) if found else default

    assistant_end = () if entry.get("efficient_eos") else (Special.EOS,)
    user = slots("format_user", (CONTENT,))
    return Template(
        name=entry["name"],
        user=user,
        assistant=slots("format_assistant", (CONTENT, *assistant_end)),
        system=slots("format_system", (CONTENT,)),
        observation=slots("format_observation", ()) or None,
        separator=slots("format_separator", ()),
        prefix=slots("format_prefix", ()),
        default_system=entry.get("default_system", ""),
        stop_words=tuple(entry.get("stop_words", ())),
        replace_eos=bool(entry.get("replace_eos")),
        reasoning=entry.get("template_class") == "ReasoningTemplate",
    )


def _fill(slots: tuple[Slot, ...], content: str) -> list[Slot]:
    return [slot.replace(CONTENT, content, 1) if isinstance(slot, str) else slot for slot in slots]


_BOS = (Special.BOS,)
_INSTRUCTION_R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., "
    "<think> reasoning process here </think><answer> answer here </answer>. Put your final answer within \\boxed{}."
)
_CODE_TOOL = (
    '{"type": "function", "function": {"name": "code_interpreter", "description": "A tool for executing code.", '
    '"parameters": {"type": "object", "properties": {"code": {"type": "string", "description": "The code to execute."}}'
    ', "required": ["code"]}}}'
)
_SEARCH_TOOL = (
    '{"type": "function", "function": {"name": "search", "description": "Searches the web for relevant information '
    'based on the given query.", "parameters": {"type": "object", "properties": {"query_list": {"type": "array", '
    '"item": {"type": "string"}, "description": "A list of fully-formed semantic queries. The tool will return search '
    'results for each query."}}, "required": ["query_list"]}}}'
)


def _chatml(
    name: str,
    *,
    before: str = "",
    after: str = "",
    default_system: str = "You are a helpful assistant.",
    reasoning: bool = False,
) -> Template:
    """Qwen's turns; `before` and `after` are put around the question."""
    assistant_turn = "<|im_start|>assistant\n"
    tool_turn = "<|im_start|>tool\n{{content}}<|im_end|>\n"
    if reasoning:
        tool_turn = "<|im_start|>user\n<tool_response>\n{{content}}\n</tool_response><|im_end|>\n"
    return Template(
        name=name,
        user=(f"<|im_start|>user\n{before}{CONTENT}<|im_end|>\n{after}{assistant_turn}",),
        assistant=("{{content}}<|im_end|>\n",) if reasoning else (CONTENT, Special.EOS),
        system=("<|im_start|>system\n{{content}}<|im_end|>\n",),
        observation=(tool_turn + assistant_turn,),
        separator=() if reasoning else ("\n",),
        default_system=default_system,
        stop_words=("<|im_end|>",),
        replace_eos=True,
        reasoning=reasoning,
    )


def _qwen_tools(name: str, tool: str) -> Template:
    system = (
        "You are a helpful assistant.\n\n# Tools\n\nYou may call one or more functions to assist with the user query."
        "\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        f"{tool}\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call>"
    )
    answer_format = "The answer format must be: \\boxed{'The final answer goes here.'}\n"
    return _chatml(name, after=answer_format, default_system=system)


def _user_assistant(name: str) -> Template:
    return Template(name, user=("User: {{content}}\n\nAssistant:",), system=("{{content}}\n\n",), prefix=_BOS)


_ALL = [
    Template("default", user=("Human: {{content}}\nAssistant:",), system=("{{content}}\n",), separator=("\n",)),
    Template("empty", assistant=(CONTENT,)),
    Template("trl", assistant=(CONTENT,), prefix=_BOS),
    _chatml("qwen"),
    _chatml("qwen_r1", before=_INSTRUCTION_R1 + "\n"),
    _chatml("qwen_math_r1", default_system="Please reason step by step, and put your final answer within \\boxed{}."),
    _qwen_tools("qwen_retool", _CODE_TOOL),
    _qwen_tools("qwen_search_tool", _SEARCH_TOOL),
    _chatml("qwen3", default_system="", reasoning=True),
    Template(
        "llama3",
        user=(
            "<|start_header_id|>user<|end_header_id|>\n\n{{content}}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        system=("<|start_header_id|>system<|end_header_id|>\n\n{{content}}<|eot_id|>",),
        observation=(
            "<|start_header_id|>tool<|end_header_id|>\n\n{{content}}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        prefix=_BOS,
        stop_words=("<|eot_id|>",),
        replace_eos=True,
    ),
    Template(
        "llama2", user=(Special.BOS, "[INST] {{content}} [/INST]"), system=("<<SYS>>\n{{content}}\n<</SYS>>\n\n",)
    ),
    Template("mistral", user=("[INST] {{content}} [/INST]",), prefix=_BOS),
    Template("mixtral", user=("[INST] {{content}} [/INST]",), prefix=_BOS),
    Template(
        "gemma",
        user=("<start_of_turn>user\n{{content}}<end_of_turn>\n<start_of_turn>model\n",),
        assistant=(CONTENT,),
        observation=("<start_of_turn>tool\n{{content}}<end_of_turn>\n<start_of_turn>model\n",),
        separator=("<end_of_turn>\n",),
        prefix=_BOS,
    ),
    Template(
        "alpaca",
        user=("### Instruction:\n{{content}}\n\n### Response:\n",),
        separator=("\n\n",),
        default_system=(
            "Below is an instruction that describes a task. "
            "Write a response that appropriately completes the request.\n\n"
        ),
    ),
    _user_assistant("deepseek2"),
    _user_assistant("deepseek2-lite"),
    _user_assistant("minicpm3"),
    Template("deepseek3", user=("<｜User｜>{{content}}<｜Assistant｜>",), prefix=_BOS),
    Template("deepseek3_r1", user=(f"{_INSTRUCTION_R1} <｜User｜>{CONTENT}<｜Assistant｜>",), prefix=_BOS),
    Template("baichuan2", user=("<reserved_106>{{content}}<reserved_107>",), assistant=(CONTENT,)),
]
TEMPLATES: dict[str, Template] = {template.name: template for template in _ALL}
