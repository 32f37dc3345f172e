"""Prompts from Hugging Face data sets, on the hub or saved to a disk."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lit.data.rows import ColumnRows, Rows
from grpo_lit.data.table import Table
from grpo_lit.errors import ConfigError


@dataclass
class HubDataset(Table):
    """Prompts from a data set on the Hugging Face hub: downloaded once, then memory-mapped from its cache.

    A prompt's id is ``data set/split/row``, counted from 0, unless ``fields.id`` names a column.

    Args:
        path: Its id on the hub, such as ``openai/gsm8k``, or a folder with its files.
        name: Its configuration, where it has several, such as ``main``.
        split: Its own split, such as ``train`` or ``test``.
        revision: Branch, tag or commit; a commit makes sure that a later run sees the same rows.

    Raises:
        ConfigError: For a data set that cannot be reached, or without such a name, split or revision.
    """

    path: str
    name: str | None = None
    split: str = "train"
    revision: str | None = None

    @property
    def origin(self) -> str:
        """The id with name and split."""
        return "/".join(part for part in (self.path, self.name, self.split) if part)

    def open(self, columns: set[str]) -> Rows:
        """Download what the cache lacks."""
        import datasets

        try:
            data = datasets.load_dataset(self.path, self.name, split=self.split, revision=self.revision)
        except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
            version = f" at {self.revision}" if self.revision else ""
            raise ConfigError(
                f"`path` expected a data set on the Hugging Face hub with this name, split and revision, but got "
                f"{self.origin}{version}: {error}. Without the hub, FileDataset reads "
                "files, and SavedDataset what `save_to_disk` wrote"
            ) from error
        return _rows(data, columns, f"{Path(self.path).name}/{self.split}")


@dataclass
class SavedDataset(Table):
    """Prompts from a folder that ``save_to_disk`` of Hugging Face ``datasets`` wrote, memory-mapped.

    A prompt's id is ``folder name/split/row``, counted from 0, unless ``fields.id`` names a column.

    Args:
        path: The folder.
        split: Which of its splits, where it has some.

    Raises:
        ConfigError: For another folder, or a split that it has not.
    """

    path: str
    split: str | None = None

    @property
    def origin(self) -> str:
        """The folder with the split."""
        return "/".join(part for part in (self.path, self.split) if part)

    def open(self, columns: set[str]) -> Rows:
        """Map the folder's files."""
        import datasets

        folder = Path(self.path).expanduser()
        try:
            data = datasets.load_from_disk(str(folder))
        except OSError as error:
            raise ConfigError(
                f"`path` expected a folder that `save_to_disk` wrote, but got {self.path}: {error}"
            ) from error
        splits = list(data) if isinstance(data, datasets.DatasetDict) else []
        if self.split not in (splits or [None]):
            choice = f"one of {', '.join(splits)}" if splits else "to be absent, as this folder has none"
            raise ConfigError(f"`split` of {self.path} expected {choice}, but got {self.split!r}")
        return _rows(
            data[self.split] if splits else data, columns, "/".join([folder.name, *filter(None, [self.split])])
        )


def _rows(data: Any, columns: Iterable[str], label: str) -> Rows:
    """Return the rows of a ``datasets.Dataset`` without the columns that nobody reads (decoding an image is slow)."""
    needed = [name for name in data.column_names if name in set(columns)]
    return ColumnRows(data.select_columns(needed), len(data), label, data.column_names)
