"""Scores of responses that were scored before: same function, options, response and row.

In memory, the least recently used leave first when the bound is reached; on disk (SQLite), the oldest. Only results
are kept, never errors and timeouts. Keys are hashes, so what a run has seen cannot be read back from the cache.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from covey import __version__
from covey.rewards.execute import FunctionSpec, Outcome

_BYTES_PER_ENTRY = 300  # measured: key, outcome and their places in the map
_BYTES_PER_PART = 120


class Cache:
    """A bounded map from key() to Outcome. `path` adds a file that outlives the run and may be shared by runs."""

    def __init__(self, max_bytes: int, path: str | None = None) -> None:
        """Open the cache; `max_bytes` 0 keeps nothing in memory, and bounds the file too."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[bytes, Outcome] = OrderedDict()
        self._file = _open(path) if path else None
        self.hits = 0
        self.misses = 0

    def get(self, key: bytes) -> Outcome | None:
        """The outcome stored under `key`, or None."""
        outcome = self._entries.get(key)
        if outcome is not None:
            self._entries.move_to_end(key)
        elif self._file is not None:
            row = self._file.execute("SELECT score, parts FROM scores WHERE key = ?", (key,)).fetchone()
            if row:
                outcome = Outcome("none" if row[0] is None else "ok", row[0], json.loads(row[1]))
                self._remember(key, outcome)
        self.hits, self.misses = self.hits + (outcome is not None), self.misses + (outcome is None)
        return outcome

    def put(self, key: bytes, outcome: Outcome) -> None:
        """Store a result; errors and timeouts are not stored."""
        if outcome.status not in ("ok", "none"):
            return
        self._remember(key, outcome)
        if self._file is not None:
            values = (key, outcome.score, json.dumps(outcome.parts))
            self._file.execute("INSERT OR REPLACE INTO scores (key, score, parts) VALUES (?, ?, ?)", values)

    def flush(self) -> None:
        """Write to the file what it does not have yet, and drop its oldest rows over the bound."""
        if self._file is None:
            return
        limit = max(1, self._max_bytes // _BYTES_PER_ENTRY)
        self._file.execute(
            "DELETE FROM scores WHERE rowid <= (SELECT rowid FROM scores ORDER BY rowid DESC LIMIT 1 OFFSET ?)",
            (limit,),
        )
        self._file.commit()

    def close(self) -> None:
        """Flush and close the file."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None

    def _remember(self, key: bytes, outcome: Outcome) -> None:
        if key in self._entries:
            return
        self._entries[key] = outcome
        self._bytes += _size(outcome)
        while self._bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= _size(oldest)


def key_maker(spec: FunctionSpec, row: dict[str, Any]) -> Callable[[str, dict[str, Any]], bytes] | None:
    """The function (response, extra) -> key for one row; None when the row holds something that is not plain data."""
    try:
        common = hashlib.sha256(repr((__version__, spec.name, spec.digest, _plain(spec.options), _plain(row))).encode())
    except TypeError:
        return None

    def key(response: str, extra: dict[str, Any]) -> bytes:
        digest = common.copy()
        digest.update(repr((response, _plain(extra))).encode("utf-8", "surrogatepass"))
        return digest.digest()[:16]

    return key


def _plain(value: Any) -> Any:
    """`value` with maps as sorted pairs, so that equal content has equal text; TypeError for other than plain data."""
    if isinstance(value, dict):
        return ("map", [(str(key), _plain(value[key])) for key in sorted(value, key=str)])
    if isinstance(value, (list, tuple)):
        return ("list", [_plain(item) for item in value])
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    raise TypeError(type(value).__name__)


def _size(outcome: Outcome) -> int:
    return _BYTES_PER_ENTRY + _BYTES_PER_PART * len(outcome.parts)


def _open(path: str) -> sqlite3.Connection:
    try:
        file = sqlite3.connect(path, timeout=30.0, check_same_thread=False)
        file.execute("PRAGMA journal_mode=WAL")
        file.execute("CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, score REAL, parts TEXT)")
    except sqlite3.Error as error:
        raise ValueError(f"reward.cache_path: {path} cannot be opened as a cache: {error}") from error
    return file
