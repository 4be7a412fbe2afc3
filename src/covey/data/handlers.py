"""A raw row -> the conversation the model is asked to continue, and the reference answer.

A handler knows the shape of the rows; the template (templates.py) knows the words around them. Names and the meaning
of `map_keys` are MindSpeed-RL's. Your own handler is a subclass given as "module:Class" or "path/file.py:Class".
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from covey.data.rows import nearest_name, require_column
from covey.data.templates import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from covey.data.rendering import Renderer

TARGETS = ("prompt", "query", "response", "history", "system")
PREFERENCE_TARGETS = ("chosen", "rejected")
ROLES = {  # how data sets call the speakers -> role
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip


@dataclass
class Conversation:
    """Example: Conversation([{"role": "user", "content": "2+2="}], system=None, response="4")"""

    messages: list[Message]  # without a system message; the last one is answered by the model
    system: str | None = None
    response: str | None = None  # the reference answer as text

    @property
    def question(self) -> str:
        """The text that is answered; empty when there is none."""
        return self.messages[-1]["content"] if self.messages else ""


@dataclass
class AlpacaStyleInstructionHandler:
    """Rows of columns: prompt and query (joined by a line break), history ([[question, answer]]), system, response.

    `prompt` may also be a list of messages, with `role`/`content` or `from`/`value`; a last message by the assistant is
    then the reference answer, unless `response` is mapped.
    """

    default_map: ClassVar[dict[str, str]] = {"prompt": "instruction", "query": "input", "response": "output"}

    map_keys: dict[str, str | None] | None  # target -> column, or to its default
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    columns: dict[str, str] = field(init=False)  # target -> column, absent targets left out

    def __post_init__(self) -> None:
        given = self.default_map if self.map_keys is None else self.map_keys
        self.columns = {target: column for target, column in given.items() if column}

    def check_columns(self, columns: Iterable[str], *, source: str, key: str = "map_keys") -> None:
        """Raise ValueError for an unknown target or a column that the rows do not have (the nearest is named)."""
        known = list(columns)
        for target, column in list(self.columns.items()):
            if target in PREFERENCE_TARGETS:
                raise ValueError(f"{key}.{target}: preference pairs (DPO) are not for GRPO. Remove chosen and rejected")
            if target not in TARGETS:
                near = nearest_name(target, TARGETS)
                hint = f" Did you mean '{near}'?" if near else ""
                raise ValueError(f"{key}.{target}: unknown target. Known: {', '.join(TARGETS)}.{hint}")
            optional = self.map_keys is None and target != "prompt"
            if optional and column not in known:
                del self.columns[target]
            else:
                require_column(known, column, key=f"{key}.{target}", source=source)
        if "prompt" not in self.columns:
            raise ValueError(
                f"{key}: nothing is mapped to 'prompt'. Add {{prompt: NAME}} (columns: {', '.join(known)})"
            )

    def conversation(self, example: dict[str, Any]) -> Conversation:
        """What is asked and answered in one raw row. Override it for rows of another shape."""
        prompt = self._value(example, "prompt")
        system = self._value(example, "system")
        response = self.response_text(self._value(example, "response"))
        messages: list[Message] = []
        for question, answer in self._value(example, "history") or ():
            messages.append({"role": "user", "content": question or ""})
            messages.append({"role": "assistant", "content": answer or ""})
        if isinstance(prompt, list):
            messages += as_messages(prompt)
            if messages and messages[0]["role"] == "system":
                system = system or messages[0]["content"]
                messages = messages[1:]
            if messages and messages[-1]["role"] == "assistant":
                response = response if "response" in self.columns else messages[-1]["content"]
                messages = messages[:-1]
        else:
            parts = [part for part in (prompt, self._value(example, "query")) if part not in (None, "")]
            messages.append({"role": "user", "content": "\n".join(map(str, parts))})
        return Conversation(messages, system or None, response)

    def response_text(self, value: Any) -> str | None:
        """The reference answer as text; of a list the first, None when absent."""
        if isinstance(value, list):
            value = value[0] if value else None
        return None if value is None else str(value)

    def model_inputs(self, examples: list[dict[str, Any]], conversations: list[Conversation]) -> list[dict[str, Any]]:
        """`input_ids`, `prompt_text`, added fields of every row; one tokenizer call unless a subclass adds fields."""
        if type(self)._tokenize_prompt is not AlpacaStyleInstructionHandler._tokenize_prompt:
            return [dict(self._tokenize_prompt(example)) for example in examples]
        rendered = self.renderer(conversations)
        return [{"input_ids": one.input_ids, "prompt_text": one.text} for one in rendered]

    def _tokenize_prompt(self, example: dict[str, Any]) -> dict[str, Any]:
        """Model inputs of one raw row. Override it to add fields: each becomes a column of the training row."""
        one = self.renderer([self.conversation(example)])[0]
        return {"input_ids": one.input_ids, "attention_mask": [1] * len(one.input_ids), "prompt_text": one.text}

    @property
    def _unwrapped_tokenizer(self) -> PreTrainedTokenizerBase:
        return self.tokenizer

    def _value(self, example: dict[str, Any], target: str) -> Any:
        column = self.columns.get(target)
        return example.get(column) if column else None


class R1AlpacaStyleInstructionHandler(AlpacaStyleInstructionHandler):
    """MindSpeed-RL's name for prompts of GRPO. History keeps the assistant's turns (upstream loses them)."""


class Math17kAlpacaStyleInstructionHandler(AlpacaStyleInstructionHandler):
    """Rows of DAPO-Math-17k: `prompt` a list of messages, `reward_model` an object with `ground_truth`."""

    default_map: ClassVar[dict[str, str]] = {"prompt": "prompt", "response": "reward_model"}

    def response_text(self, value: Any) -> str | None:
        """The object's `ground_truth`."""
        return super().response_text(value.get("ground_truth") if isinstance(value, dict) else value)


class SharegptStyleInstructionHandler(AlpacaStyleInstructionHandler):
    """Rows of turns: `conversations` = [{"from": "human", "value": ...}, {"from": "gpt", ...}]; all turns stay."""

    default_map: ClassVar[dict[str, str]] = {"prompt": "conversations", "system": "system"}


class ChatTemplateHandler(AlpacaStyleInstructionHandler):
    """Rows of chat messages: `messages` = [{"role": "user", "content": ...}, ...]; use it with prompt_type: chat."""

    default_map: ClassVar[dict[str, str]] = {"prompt": "messages"}


HANDLERS: dict[str, type[AlpacaStyleInstructionHandler]] = {
    "R1AlpacaStyleInstructionHandler": R1AlpacaStyleInstructionHandler,
    "AlpacaStyleInstructionHandler": AlpacaStyleInstructionHandler,
    "Math17kAlpacaStyleInstructionHandler": Math17kAlpacaStyleInstructionHandler,
    "SharegptStyleInstructionHandler": SharegptStyleInstructionHandler,
    "ChatTemplateHandler": ChatTemplateHandler,
}
UNSUPPORTED = {
    "AlpacaStylePairwiseHandler": "preference pairs (DPO) are not for GRPO",
    "AlpacaStyleProcessRewardHandler": "process reward models are not trained here",
}


def find_handler(name: str) -> type[AlpacaStyleInstructionHandler]:
    """The class of a registered name, "module:Class" or "path/file.py:Class". Raises ValueError with known names."""
    if name in HANDLERS:
        return HANDLERS[name]
    if name in UNSUPPORTED:
        raise ValueError(f"handler_name: {name}: {UNSUPPORTED[name]}. Known: {', '.join(HANDLERS)}")
    where, _, class_name = name.rpartition(":")
    if not where:
        near = nearest_name(name, HANDLERS)
        hint = f" Did you mean '{near}'?" if near else ""
        raise ValueError(
            f"handler_name: unknown handler '{name}'. Known: {', '.join(HANDLERS)}; "
            f"your own: module:Class or file.py:Class.{hint}"
        )
    found = getattr(_load_module(where), class_name, None)
    if not (isinstance(found, type) and issubclass(found, AlpacaStyleInstructionHandler)):
        raise ValueError(
            f"handler_name: {name}: {where} has no handler class '{class_name}'. "
            "It must subclass a handler of covey.data.handlers"
        )
    return found


def as_messages(value: list[Any]) -> list[Message]:
    """A list of chat messages in either spelling, as role and text. Raises ValueError for anything else."""
    messages: list[Message] = []
    for item in value:
        if not isinstance(item, dict):
            raise ValueError(f"a chat message must be an object with role and content, not {item!r:.60}")
        role = item.get("role") or item.get("from")
        content = item.get("content") if item.get("content") is not None else item.get("value")
        if role not in ROLES:
            raise ValueError(f"a chat message has the role {role!r}. Known: {', '.join(ROLES)}")
        messages.append({"role": ROLES[role], "content": _text(content)})
    return messages


def _text(content: Any) -> str:
    """A message's text; content may be a list of {"type": "text", "text": ...} parts."""
    if isinstance(content, list):
        other = [part for part in content if not (isinstance(part, dict) and isinstance(part.get("text"), str))]
        if other:
            raise ValueError(f"a chat message has a part that is not text: {other[0]!r:.60}. Only text is trained")
        return "".join(part["text"] for part in content)
    return "" if content is None else str(content)


def _load_module(where: str) -> Any:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise ValueError(f"handler_name: cannot import '{where}' ({error}). Give a module or a .py file") from error
    path = Path(where)
    if not path.is_file():
        raise ValueError(f"handler_name: {where} does not exist. Give the path of your .py file")
    spec = importlib.util.spec_from_file_location(f"covey_handler_{path.stem}", path)
    assert spec and spec.loader  # a .py suffix always has a loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
