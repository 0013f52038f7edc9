"""Rows that are announced before training comes to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from draftkit.data.packing import PackedRow


class Ahead:
    """Tells `announce` the samples of rows, up to `count` rows before they are used."""

    def __init__(self, announce: Callable[[Sequence[int]], None], count: int):
        self._announce = announce
        self._count = count
        self._epoch: Iterator[PackedRow] | None = None
        self._rows: Iterator[PackedRow] = iter(())

    def of_epoch(self, rows: Iterator[PackedRow]) -> Iterator[PackedRow]:
        """The rows of an iterator that is asked for again and again: the same one goes on where it was."""
        if rows is not self._epoch:
            self._epoch, self._rows = rows, self.of(rows)
        return self._rows

    def of(self, rows: Iterator[PackedRow]) -> Iterator[PackedRow]:
        waiting: deque[PackedRow] = deque()
        for row in rows:
            self._announce(row["numbers"])
            waiting.append(row)
            if len(waiting) > self._count:
                yield waiting.popleft()
        yield from waiting
