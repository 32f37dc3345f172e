"""Prompts from files: JSON lines, JSON arrays, Parquet, CSV."""

import csv
import glob
import json
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lit.data.rows import BadRow, ColumnRows, JoinedRows, ListRows, Row, Rows
from grpo_lit.data.table import Table
from grpo_lit.errors import ConfigError

#: Endings of the files that can be read.
ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")


@dataclass
class FileDataset(Table):
    """Prompts from one file or several, each row one prompt.

    JSON lines (``.jsonl``, ``.ndjson``), JSON arrays of objects (``.json``), Parquet, CSV with a header (``.csv``,
    ``.tsv``; every field is a text). A prompt's id is ``file name/row``, counted from 0, unless ``fields.id`` names a
    column.

    Args:
        path: A file, a pattern such as ``data/*.parquet`` (its files in the order of their names), or a list of these.

    Raises:
        ConfigError: For a file that is not there, or that is not what its ending says.
    """

    path: str | list[str]

    @property
    def origin(self) -> str:
        """The path, as it was given."""
        return self.path if isinstance(self.path, str) else ", ".join(self.path)

    def open(self, columns: set[str]) -> Rows:
        """Open every file."""
        paths = [self.path] if isinstance(self.path, str) else self.path
        parts = [open_file(file, columns) for path in paths for file in _files(path)]
        if not parts:
            raise ConfigError("`path` expected at least one file, but got an empty list")
        return parts[0] if len(parts) == 1 else JoinedRows(parts)


class JsonLines(Rows):
    """A file with one JSON object per line; blank lines count for nothing.

    Only the place of each line is held in memory. Read by the json module and not as a column table, because one
    malformed line would then lose the file, and a text that looks like a date or a number would become one.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.label = path, path.stem
        self._starts, self._lines = array("Q"), array("Q")
        position = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._starts.append(position)
                    self._lines.append(number)
                position += len(line)

    def __len__(self) -> int:
        """Return the number of lines that are not blank."""
        return len(self._starts)

    def read(self, start: int, stop: int) -> list[Row | BadRow]:
        """Parse the lines ``start`` to ``stop - 1``."""
        with self.path.open("rb") as file:
            rows = []
            for at in self._starts[start:stop]:
                file.seek(at)
                rows.append(self._parse(file.readline()))
            return rows

    def where(self, index: int) -> str:
        """Return the line's number."""
        return f"line {self._lines[index]}"

    @staticmethod
    def _parse(line: bytes) -> Row | BadRow:
        try:
            return _row(json.loads(line))
        except (ValueError, RecursionError):  # malformed, bytes that are no text, or nested beyond reading
            return BadRow("malformed JSON")


class _Slices:
    """An Arrow table with the slices of ``datasets.Dataset``."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __getitem__(self, rows: slice) -> dict[str, list[Any]]:
        return self._table.slice(rows.start, rows.stop - rows.start).to_pydict()


def open_file(path: Path, columns: Collection[str]) -> Rows:
    """Return the rows of one file, by its ending.

    Args:
        path: A file with one of :data:`ENDINGS`. ``.json`` holds an array of objects, or one object per line.
        columns: What will be asked for: no other column of a Parquet file is read.

    Raises:
        ConfigError: For another ending, or a file that is not what its ending says.
    """
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise ConfigError(
            f"`path` expected a file that ends in {', '.join(ENDINGS)}, but got {path}: decompress it, or convert it "
            "to one of them"
        )
    try:
        if ending == ".parquet":
            return _open_parquet(path, columns)
        if ending in (".csv", ".tsv"):
            return _open_csv(path, "\t" if ending == ".tsv" else ",")
        return _open_json(path)
    except (ValueError, csv.Error) as error:  # Arrow's errors, too, are ValueErrors
        raise ConfigError(f"`path` expected a {ending} file, but got {path}, which cannot be read: {error}") from error


def _files(path: str) -> list[Path]:
    """Return the file, or those that the pattern stands for."""
    file = Path(path).expanduser()
    if file.is_file():
        return [file]
    matching = sorted(Path(match) for match in glob.glob(str(file), recursive=True) if Path(match).is_file())
    if not matching:
        kind = "a file, but got the folder" if file.is_dir() else "a file that exists, but got"
        hint = (
            "name the files in it, or use SavedDataset for what `save_to_disk` wrote"
            if file.is_dir()
            else (f"relative paths start at {Path.cwd()}; HubDataset reads from the Hugging Face hub")
        )
        raise ConfigError(f"`path` expected {kind} {path}: {hint}")
    return matching


def _row(value: Any) -> Row | BadRow:
    return value if isinstance(value, dict) else BadRow("not an object with named fields")


def _open_json(path: Path) -> Rows:
    with path.open("rb") as file:
        start = file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):
        return JsonLines(path)
    return ListRows([_row(value) for value in json.loads(path.read_bytes())], path.stem)


def _open_csv(path: Path, delimiter: str) -> Rows:
    """Read a table of texts: a reader that guesses types would make 7 of ``007`` and nothing of ``NA``."""
    rows: list[Row | BadRow] = []
    lines: list[int] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            for values in reader:
                if values:
                    fits = len(values) == len(header)
                    rows.append(
                        dict(zip(header, values, strict=True)) if fits else BadRow("more or fewer fields than names")
                    )
                    lines.append(reader.line_num)
        except csv.Error as error:
            raise csv.Error(f"line {reader.line_num}: {error}") from error
    return ListRows(rows, path.stem, lines)


def _open_parquet(path: Path, columns: Collection[str]) -> Rows:
    import pyarrow.parquet

    names = pyarrow.parquet.read_schema(path).names
    kept = [name for name in names if name in columns]
    table = pyarrow.parquet.read_table(path, columns=kept)
    return ColumnRows(_Slices(table), table.num_rows, path.stem, names)
