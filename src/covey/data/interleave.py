"""Rows of several sources, drawn with given probabilities, streamed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from covey.data.readers import BATCH_ROWS
from covey.data.rows import cast_table, read_tables


def interleave(
    sources: Sequence[str], probabilities: Sequence[float], *, seed: int, schema: pa.Schema
) -> Iterator[pa.Table]:
    """Draw a source for every row until one drawn has no row left; each source's rows keep their order.

    That is the first_exhausted rule of `datasets.interleave_datasets`: the mixture keeps its shares to the end.
    """
    draw = np.random.Generator(np.random.PCG64(seed))
    readers = [_Reader(source, schema) for source in sources]
    while True:
        chosen = draw.choice(len(sources), size=BATCH_ROWS, p=np.asarray(probabilities) / np.sum(probabilities))
        places = [np.flatnonzero(chosen == i) for i in range(len(sources))]
        parts = [reader.take(len(place)) for reader, place in zip(readers, places, strict=True)]
        end = min(
            (
                int(place[part.num_rows])
                for place, part in zip(places, parts, strict=True)
                if part.num_rows < len(place)
            ),
            default=BATCH_ROWS,
        )
        order = np.empty(BATCH_ROWS, dtype=np.int64)  # for every drawn row, its place in the joined parts
        first = 0
        for place, part in zip(places, parts, strict=True):
            order[place[: part.num_rows]] = np.arange(first, first + part.num_rows)
            first += part.num_rows
        if end:
            yield pa.concat_tables(parts).take(pa.array(order[:end]))
        if end < BATCH_ROWS:
            return


class _Reader:
    """Hands out a source's rows in any number."""

    def __init__(self, source: str, schema: pa.Schema) -> None:
        self._tables = (cast_table(table, schema) for table in read_tables(source))
        self._rest = schema.empty_table()

    def take(self, count: int) -> pa.Table:
        """The next `count` rows, fewer at the end."""
        while self._rest.num_rows < count:
            table = next(self._tables, None)
            if table is None:
                break
            self._rest = pa.concat_tables([self._rest, table])
        taken, self._rest = self._rest.slice(0, count), self._rest.slice(count)
        return taken
