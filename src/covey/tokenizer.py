"""A tokenizer that tokenises as its tokenizer.json says.

transformers chooses a tokenizer's class by the model's family, and a family's class may bring its own pre-tokenizer and
normalizer: beside qwen2 weights, a tokenizer.json of another kind is read as if it were Qwen2's, and every text becomes
other tokens without a word. So the loaded tokenizer is compared with the file on texts of many kinds.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Cases, digits, contractions, spaces, line ends, code, formulas, accents in two normal forms, scripts, emoji, controls.
PROBES = (
    "The quick brown fox doesn't jump; it'll wait. I'VE 12345 reasons, 3.14159 of them irrational!",
    "  leading  double  spaces\tand\ttabs \n\n\r\nline ends \n",
    "def f(x):\n    return [x**2 for _ in range(10) if x != None]  # comment\n\n\n",
    r"\frac{1}{2} + \boxed{-42} \le x_{i+1}^2, $a \neq b$, 1+1=2, 47+38=85",
    "caf\u00e9 cafe\u0301 \u00c5ngstr\u00f6m \ufb01 \u2460 na\u00efve",
    "\u6211\u7231\u6570\u5b66\uff0c\u56db\u5341\u4e8c\u3002 \u3053\u3093\u306b\u3061\u306f",
    "\ud55c\uad6d\uc5b4 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0627\u0644\u0639\u0631\u0628",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2014 \u201cquotes\u201d \u2026 \u00a0 \u200b end",
    "<think>steps</think><answer>yes</answer>",
)


def read_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a directory or hub id as transformers chooses it; where that differs, as tokenizer.json says.

    A difference is logged; ValueError when the plain reading differs from the file too. Without a tokenizer.json there
    is nothing to compare. Raises what transformers raises (OSError, ValueError) when there is no tokenizer.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # seconds; not every process needs them

    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    file = _tokenizer_file(str(path))
    if file is None:
        return tokenizer
    saved = Tokenizer.from_file(file)
    difference = first_difference(saved, tokenizer)
    if difference is None:
        return tokenizer
    plain = PreTrainedTokenizerFast.from_pretrained(path)
    if first_difference(saved, plain) is not None:
        raise ValueError(
            f"tokenizer {str(path)!r} is not read as its tokenizer.json says: {difference}. Save it again with "
            "the transformers that is installed, from the program that made it, and check it there"
        )
    log.warning(
        "%s: transformers reads this tokenizer as %s, which tokenises otherwise than its tokenizer.json: %s. "
        "Covey goes by tokenizer.json; programs that use AutoTokenizer, vLLM for example, may not",
        path,
        type(tokenizer).__name__,
        difference,
    )
    return plain


def first_difference(saved: Tokenizer, loaded: Any) -> str | None:
    """The first probe, or added token, for which both give other ids; None when there is none."""
    added = [token.content for token in saved.get_added_tokens_decoder().values()]
    for text in (*PROBES, *added):
        wanted = saved.encode(text, add_special_tokens=False).ids
        found = loaded(text, add_special_tokens=False).input_ids
        if found != wanted:
            at = next((i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]), 0)
            return f"{text[:40]!r} gives ids {found[at : at + 6]}..., the file says {wanted[at : at + 6]}..."
    return None


def _tokenizer_file(path: str) -> str | None:
    """tokenizer.json of a local directory or hub id; None when it has none."""
    if Path(path).is_dir():
        file = Path(path) / "tokenizer.json"
        return str(file) if file.exists() else None
    from transformers.utils.hub import cached_file

    return cached_file(
        path,
        "tokenizer.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
