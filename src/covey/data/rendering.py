"""Conversation -> the text the model reads and its token ids, by a named template or the tokenizer's own.

Ids are made once, here; nothing downstream tokenises a prompt again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from covey.data.templates import Slot, Special, Template, get_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from covey.data.handlers import Conversation


@dataclass(frozen=True)
class Rendered:
    """Example: Rendered("<|im_start|>user\\n2+2=<|im_end|>\\n...", [151644, 872, 198, ...])"""

    text: str
    input_ids: list[int]


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Ids of every text, without special tokens, as `tokenizer.encode` gives them.

    A fast tokenizer is asked directly: a fifth less time than through its wrapper, which builds masks and offsets.
    """
    if not tokenizer.is_fast:
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    backend.no_truncation()  # a tokenizer.json may carry both; the wrapper resets them as well
    backend.no_padding()
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


class Renderer:
    """The template of a run with its tokenizer. `prompt_type` is the resolved name: never "auto"."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_type: str,
        *,
        system: str | None = None,
        options: dict[str, Any] | None = None,
        prompt_type_path: str | None = None,
    ) -> None:
        """`options` go to the chat template; of named templates only qwen3 takes one: enable_thinking.

        Raises ValueError: unknown template, no chat template, stop word that is not one token of this tokenizer.
        """
        if prompt_type == "auto":
            prompt_type = "chat" if tokenizer.chat_template else "empty"
        self.tokenizer = tokenizer
        self.prompt_type = prompt_type
        self.system = system
        self.options = dict(options or {})
        self.template: Template | None = None
        if prompt_type != "chat":
            self.template = get_template(prompt_type, prompt_type_path)
        elif not tokenizer.chat_template:
            raise ValueError(
                "prompt_type: chat needs a chat template, and this tokenizer has none. "
                "Use a named template (for example qwen), prompt_type: empty, or an instruct model's tokenizer"
            )
        if self.template and (
            unused := set(self.options) - ({"enable_thinking"} if self.template.reasoning else set())
        ):
            raise ValueError(
                f"{', '.join(sorted(unused))} has no effect with prompt_type: {prompt_type}. "
                "Remove it, or use prompt_type: chat"
            )
        self.stop_words: tuple[str, ...] = self.template.stop_words if self.template else ()
        self.stop_token_ids = [self._token_id(word) for word in self.stop_words]

    def __call__(self, conversations: Sequence[Conversation]) -> list[Rendered]:
        """Text and ids of each conversation; every distinct piece of text is tokenised once per call."""
        slots = [self._slots(conversation) for conversation in conversations]
        texts = list(dict.fromkeys(slot for row in slots for slot in row if isinstance(slot, str)))
        ids: dict[Slot, list[int]] = {}
        if texts:
            ids.update(zip(texts, encode_texts(self.tokenizer, texts), strict=True))
        special = {slot: self._special(slot) for row in slots for slot in row if isinstance(slot, Special)}
        ids.update({slot: [found[1]] if found else [] for slot, found in special.items()})
        names = {slot: found[0] if found else "" for slot, found in special.items()}
        return [
            Rendered(
                "".join(slot if isinstance(slot, str) else names[slot] for slot in row),
                [i for s in row for i in ids[s]],
            )
            for row in slots
        ]

    def _slots(self, conversation: Conversation) -> list[Slot]:
        system = conversation.system or self.system
        if self.template:
            thinking = bool(self.options.get("enable_thinking", False))
            return self.template.slots(conversation.messages, system, enable_thinking=thinking)
        import jinja2

        messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        messages += conversation.messages
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.options
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the tokenizer's chat template refuses this conversation: {error}") from error
        return [str(text)]

    def _special(self, slot: Special) -> tuple[str, int] | None:
        """Text and id of the tokenizer's bos or eos; None when it has none, as upstream."""
        if slot is Special.EOS and self.template and self.template.replace_eos:
            return self.stop_words[0], self.stop_token_ids[0]
        text = self.tokenizer.bos_token if slot is Special.BOS else self.tokenizer.eos_token
        token_id = self.tokenizer.bos_token_id if slot is Special.BOS else self.tokenizer.eos_token_id
        return None if token_id is None else (str(text), int(token_id))  # type: ignore[arg-type]

    def _token_id(self, word: str) -> int:
        ids = self.tokenizer.encode(word, add_special_tokens=False)
        if len(ids) != 1:
            raise ValueError(
                f"prompt_type: {self.prompt_type} ends answers with '{word}', which is {len(ids)} tokens of this "
                "tokenizer, not one. This template is for another model: use prompt_type: chat or the model's own"
            )
        return ids[0]
