"""PREFIX.manifest.json: what `covey preprocess` did, checked before training uses PREFIX.parquet.

The data file is put in place first and the manifest last, so a run that was interrupted leaves nothing that training
accepts: the manifest is missing, or does not fit the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covey.data.rows import find_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = "covey prompts"
VERSION = 1
SUFFIX = ".manifest.json"
PROBE = "A probe: 12+34=46, naïve café, 计算圆的面积 \\boxed{78.54}\n\t<|im_end|>"


def find_manifest(path: str) -> Path | None:
    """The manifest that belongs to a prefix, a PREFIX.parquet or a manifest itself; None when there is none."""
    stem = path.removesuffix(SUFFIX).removesuffix(".parquet")
    found = Path(stem + SUFFIX)
    return found if found.is_file() else None


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest. Raises ValueError when it is not one or is of another version."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON ({error}). Run covey preprocess again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise ValueError(f"{path}: not a manifest of version {VERSION}. Run covey preprocess again")
    return manifest


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Put the manifest in place, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps({"format": FORMAT, "version": VERSION, **manifest}, ensure_ascii=False, indent=1))
    os.replace(temporary, path)


def data_file(manifest_path: Path, manifest: dict[str, Any]) -> Path:
    """The parquet file of a manifest. Raises ValueError when it is missing or is not the one that was written."""
    path = manifest_path.with_name(manifest["file"]["name"])
    if not path.is_file():
        raise ValueError(f"{path}: missing, though {manifest_path.name} names it. Run covey preprocess again")
    if path.stat().st_size != manifest["file"]["bytes"]:
        raise ValueError(
            f"{path}: {path.stat().st_size} bytes, but {manifest_path.name} says {manifest['file']['bytes']}: "
            "an interrupted run, or a file that was changed. Run covey preprocess again"
        )
    return path


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What must be equal between preprocessing and training: the vocabulary and how it splits text; and the eos."""
    digest = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    digest.update(json.dumps(tokenizer.encode(PROBE, add_special_tokens=False)).encode())
    return {"hash": digest.hexdigest()[:16], "eos_token": tokenizer.eos_token, "eos_token_id": tokenizer.eos_token_id}


def source_identity(source: str | list[str]) -> list[list[Any]]:
    """Name, size and time of change of every input file; a hub id stands for itself."""
    found: list[list[Any]] = []
    for one in [source] if isinstance(source, str) else source:
        if not Path(one).exists():
            found.append([one])
            continue
        for path in find_files(one):
            stat = path.stat()
            found.append([str(path), stat.st_size, stat.st_mtime_ns])
    return found
