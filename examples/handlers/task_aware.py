"""A handler of your own: it adds the task's name as token ids to every training row.

Use it by path, without installing anything:

    handler_name: examples/handlers/task_aware.py:TaskAwareInstructionHandler

Whatever `_tokenize_prompt` adds becomes a column of the preprocessed file and reaches the reward functions, beside
the raw columns, which are kept anyway.
"""

from __future__ import annotations

from typing import Any

from covey.data.handlers import R1AlpacaStyleInstructionHandler


class TaskAwareInstructionHandler(R1AlpacaStyleInstructionHandler):
    """Adds `task_ids`."""

    def _tokenize_prompt(self, example: dict[str, Any]) -> dict[str, Any]:
        model_inputs = super()._tokenize_prompt(example)
        model_inputs["task_ids"] = self._unwrapped_tokenizer.encode(
            example["task"], padding=False, add_special_tokens=False
        )
        return model_inputs
