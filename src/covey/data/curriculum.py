"""Which prompts come next: by a column, or by how often their responses passed so far.

`order` sorts every epoch; `sample` draws an epoch's prompts with replacement. By pass rate p, a prompt's weight is
p (1 - p), the variance of a pass: prompts that always or never pass teach nothing. Prompts whose groups were all right
or all wrong several times in a row can be left out. Everything measured is part of the stream's checkpoint.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from covey.config.schema import CurriculumConfig
from covey.data.prompts import PromptSet
from covey.data.rows import require_column

logger = logging.getLogger(__name__)

PASS_RATE = "pass_rate"
UNSEEN = 0.5  # pass rate of a prompt that was not tried yet
LEAST_WEIGHT = 0.01  # so that a prompt that always or never passed is still tried now and then


class Curriculum:
    """The order of each epoch, and what was measured of every prompt. Indices are places in the prompt set."""

    def __init__(self, prompts: PromptSet, config: CurriculumConfig, *, seed: int, shuffle: bool) -> None:
        """Raises ValueError when the column is missing, or its values cannot be sorted or are no weights."""
        self._config = config
        self._seed = seed
        self._shuffle = shuffle
        self._source = prompts.source
        self._rates = np.full(len(prompts), np.nan)  # share of the last group that passed; NaN: not tried
        self._streaks = np.zeros(len(prompts), dtype=np.int64)  # groups in a row that were all right or all wrong
        self._column: np.ndarray | None = None
        if config.by not in (None, PASS_RATE):
            require_column(prompts.table.column_names, config.by, key="data.curriculum.by", source=prompts.source)
            self._column = self._values(prompts.table[config.by].to_pylist())

    def order(self, epoch: int) -> np.ndarray:
        """Indices of an epoch's prompts in order; depends on seed, epoch and what was recorded."""
        draw = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        left = np.flatnonzero(~self._is_done())
        if not len(left):
            logger.warning("%s: every prompt was always or never solved; all come back", self._source)
            self._streaks[:] = 0
            left = np.arange(len(self._rates))
        if self._config.by is not None and self._config.mode == "sample":
            weights = self._weights()[left]
            return draw.choice(left, size=len(left), p=weights / weights.sum())
        order = draw.permutation(left) if self._shuffle else left
        if self._config.by is None:
            return order
        keys = self._keys()[order]
        known = ~np.isnan(keys)
        ranked = order[known][np.argsort(-keys[known] if self._config.descending else keys[known], kind="stable")]
        return np.concatenate([ranked, order[~known]])  # rows without a value come last

    def record(self, index: int, pass_rate: float) -> None:
        """A prompt's group passed to this share, 0 to 1."""
        self._rates[index] = pass_rate
        self._streaks[index] = self._streaks[index] + 1 if pass_rate in (0.0, 1.0) else 0

    @property
    def num_left_out(self) -> int:
        """Prompts that are left out from the next epoch on."""
        return int(self._is_done().sum())

    def state_dict(self) -> dict[str, Any]:
        """What was measured, as plain lists."""
        rates = [None if np.isnan(rate) else float(rate) for rate in self._rates]
        return {"settings": self._config.model_dump(), "pass_rates": rates, "streaks": self._streaks.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the settings changed."""
        if state["settings"] != self._config.model_dump():
            raise ValueError(
                f"data.curriculum differs from the checkpoint's ({state['settings']}). Set it back to resume"
            )
        self._rates = np.array([np.nan if rate is None else rate for rate in state["pass_rates"]])
        self._streaks = np.array(state["streaks"], dtype=np.int64)

    def _is_done(self) -> np.ndarray:
        return self._streaks >= (self._config.drop_after or np.inf)

    def _keys(self) -> np.ndarray:
        if self._column is not None:
            return self._column
        return np.where(np.isnan(self._rates), UNSEEN, self._rates)

    def _weights(self) -> np.ndarray:
        if self._column is not None:
            return np.nan_to_num(self._column)
        rates = self._keys()
        return np.maximum(rates * (1 - rates), LEAST_WEIGHT)

    def _values(self, values: list[Any]) -> np.ndarray:
        """The column as numbers; text is replaced by its rank, null by NaN."""
        by, mode = self._config.by, self._config.mode
        given = [value for value in values if value is not None]
        if given and all(isinstance(value, str) for value in given) and mode == "order":
            ranks = {value: rank for rank, value in enumerate(sorted(set(given)))}
            values = [None if value is None else ranks[value] for value in values]
        elif not given or not all(isinstance(value, (int, float)) for value in given):
            kind = "numbers or text" if mode == "order" else "numbers"
            raise ValueError(f"data.curriculum.by: column '{by}' must hold {kind} to {mode} by it")
        numbers = np.array([np.nan if value is None else float(value) for value in values])
        if mode == "sample" and (np.nanmin(numbers) < 0 or np.nansum(numbers) <= 0):
            raise ValueError(f"data.curriculum.by: column '{by}' must hold weights: none below 0, one above")
        return numbers
