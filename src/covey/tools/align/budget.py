"""How much of a capture fits into `--budget`: rows of activations, logits and gradients.

Ids, fingerprints, per-token numbers and the norms of all rows come first and always fit or the capture is refused.
A tenth of what is left goes to logits, a fifth to gradients, the rest to activations: of all rows if they fit, else of
as many as do; when fewer than 16 would, the steps within layers are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from covey.models.architectures import layers_of
from covey.tools.align.facts import head_dim
from covey.tools.align.rows import Layout

MAX_LOGIT_ROWS = 16
_FEW = 16  # rows below which the steps within layers are not worth it
_JSON_BYTES, _PER_PARAMETER, _PER_STEP = 64 << 10, 1200, 400  # of the text and of the tensors' headers


@dataclass(frozen=True)
class Plan:
    """What is kept."""

    rows: int
    details: bool
    logit_rows: int
    gradient_bytes: int  # of gradients and of updates together


def make_plan(model: Any, layout: Layout, *, budget_bytes: int, num_tokens: int, dtype: torch.dtype) -> Plan:
    """ValueError names the smallest budget when not even one row of every layer's output fits."""
    size = torch.empty((), dtype=dtype).element_size()
    settings = model.config.get_text_config()
    layers = list(layers_of(model))
    width, vocabulary = settings.hidden_size, settings.vocab_size
    inner = [_widths(layer, settings) for layer in layers]
    plain = (len(layers) + 2) * width + 2 * head_dim(settings)  # outputs, embedding, final norm; cos and sin
    vectors = sum(p.numel() * p.element_size() for p in model.parameters() if p.dim() == 1)
    num_parameters = sum(1 for _ in model.parameters())

    def fixed(details: bool) -> int:
        steps = len(layers) + 5 + (sum(len(widths) for widths in inner) if details else 0)
        texts = _JSON_BYTES + num_parameters * _PER_PARAMETER + steps * _PER_STEP
        return texts + vectors + 64 * num_tokens + len(layout) * (40 + 4 * steps)

    per_row = {False: plain * size, True: (plain + sum(map(sum, inner))) * size}
    for details in (True, False):
        left = budget_bytes - fixed(details)
        logits = min(MAX_LOGIT_ROWS, left // 10 // (vocabulary * 4 + width * size))
        rows = min(len(layout), int(left * 0.7) // per_row[details])
        if rows >= (min(_FEW, len(layout)) if details else 1):
            return Plan(rows, details, max(logits, 0), int(left * 0.2))
    least = fixed(False) + int(per_row[False] / 0.7) + 1
    raise ValueError(
        f"--budget {budget_bytes} bytes: this set needs at least {least}; raise it, or take fewer --prompts"
    )


def parse_bytes(text: str) -> int:
    """`256MiB`, `2GB`, `500000`: bytes. ValueError for anything else."""
    units = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
    number = text.strip().lower().rstrip("bkmgi")
    unit = text.strip().lower()[len(number) :]
    try:
        return int(float(number) * units[unit])
    except (ValueError, KeyError):
        raise ValueError(f"--budget {text}: not a size; write it as 256MiB, 2GB or in bytes") from None


def _widths(layer: nn.Module, settings: Any) -> list[int]:
    """Width of every step within a layer (hooks.py)."""
    found = []
    for name, module in layer.named_modules():
        if not name or any(module.children()) or not any(True for _ in module.parameters(recurse=False)):
            continue
        if isinstance(module, nn.Linear):
            found.append(module.out_features)
            if name == "self_attn.o_proj":
                found.append(module.in_features)
        else:  # a norm: of the hidden state, or of every head
            found.append(max(settings.hidden_size, settings.num_attention_heads * head_dim(settings)))
    return found
