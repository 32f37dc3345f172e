"""Rows of data, wherever they lie: random access, and each bad row for itself."""

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]


class BadRow(ValueError):
    """A row that nothing can be learnt from. The message is the reason, worded alike for all rows of its kind."""


class Rows(ABC):
    """An ordered, finite table.

    Attributes:
        label: Goes before a row's number in its id; says where rows come from, not where that lies on a disk.
        columns: Names of all columns, where they are known without reading the rows.
    """

    label: str
    columns: tuple[str, ...] = ()

    @abstractmethod
    def __len__(self) -> int:
        """Return how many rows there are, bad ones included."""

    @abstractmethod
    def read(self, start: int, stop: int) -> list[Row | BadRow]:
        """Return rows ``start`` to ``stop - 1``, with what is wrong in place of those that cannot be read."""

    def where(self, index: int) -> str:
        """Return how a person finds row ``index``: a line counted from 1 as editors do, a row from 0 as ids do."""
        return f"row {index}"

    def name(self, index: int) -> str:
        """Return an id for row ``index``, which depends on its place in the data alone."""
        return f"{self.label}/{index}"


class ListRows(Rows):
    """Rows held in memory.

    Args:
        rows: The rows.
        label: Goes before a row's number in its id.
        lines: The line on which each row ends in its file, where it has one.
    """

    def __init__(self, rows: Sequence[Row | BadRow], label: str, lines: Sequence[int] | None = None) -> None:
        self.label, self._rows, self._lines = label, rows, lines

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def read(self, start: int, stop: int) -> list[Row | BadRow]:
        """Return rows ``start`` to ``stop - 1``."""
        return list(self._rows[start:stop])

    def where(self, index: int) -> str:
        """Return the line, or the row where lines say nothing."""
        return f"line {self._lines[index]}" if self._lines else super().where(index)


class ColumnRows(Rows):
    """Rows of a table that is held by columns.

    Args:
        slices: Returns ``{column: values}`` for a slice, as ``datasets.Dataset`` does.
        size: Number of rows.
        label: Goes before a row's number in its id.
        columns: Names of all columns, those that ``slices`` leaves out too.
    """

    def __init__(self, slices: Any, size: int, label: str, columns: Iterable[str]) -> None:
        self.label, self.columns = label, tuple(columns)
        self._slices, self._size = slices, size

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._size

    def read(self, start: int, stop: int) -> list[Row | BadRow]:
        """Return rows ``start`` to ``stop - 1``."""
        columns = self._slices[start : min(stop, self._size)]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


class JoinedRows(Rows):
    """Several tables, one after the other.

    Args:
        parts: The tables. A label that comes again gets a number, so that no two rows share a name.
    """

    def __init__(self, parts: Sequence[Rows]) -> None:
        labels = [part.label for part in parts]
        for i, part in enumerate(parts):
            repeat = labels[:i].count(labels[i])
            part.label = f"{labels[i]}#{repeat}" if repeat else labels[i]
        self.parts, self.label = parts, "+".join(labels)
        self.columns = tuple(dict.fromkeys(name for part in parts for name in part.columns))
        self._ends = list(itertools.accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        """Return the number of rows of all parts."""
        return self._ends[-1]

    def read(self, start: int, stop: int) -> list[Row | BadRow]:
        """Return rows ``start`` to ``stop - 1``, over the borders of parts."""
        rows: list[Row | BadRow] = []
        while start + len(rows) < min(stop, len(self)):
            part, position = self._find(start + len(rows))
            rows += part.read(position, min(position + stop - start - len(rows), len(part)))
        return rows

    def where(self, index: int) -> str:
        """Return the part and the place in it."""
        part, position = self._find(index)
        return f"{part.label} {part.where(position)}"

    def name(self, index: int) -> str:
        """Return the part's own name of the row."""
        part, position = self._find(index)
        return part.name(position)

    def _find(self, index: int) -> tuple[Rows, int]:
        which = bisect_right(self._ends, index)
        return self.parts[which], index - (self._ends[which - 1] if which else 0)
