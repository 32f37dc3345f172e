"""Prompts from a table: the columns that hold them, and which rows are asked."""

import difflib
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from lightning.fabric.utilities.rank_zero import rank_zero_warn

from grpo_lit.data.answers import Extract, ground_truth
from grpo_lit.data.fields import Fields, cell, text_of
from grpo_lit.data.reasoning_gym import plain
from grpo_lit.data.rows import BadRow, Row, Rows
from grpo_lit.data.source import PromptSource, is_heldout
from grpo_lit.data.tally import Tally
from grpo_lit.errors import ConfigError
from grpo_lit.rollout import Prompt

#: Rows looked at together when a table is opened.
CHUNK = 1000


@dataclass
class Table(PromptSource):
    """Prompts from the rows of a table; each is made when it is asked for.

    All rows are looked at once, at the start. A bad one (malformed, without its question, answer, id or domain, or with
    an answer that ``extract`` finds no ground truth in) is never asked: one warning counts them by reason and names
    the first few.

    Args:
        fields: Which column holds what.
        extract: Where in the answer column the ground truth stands: ``text``, all of it; ``number``, all of it, which
            must be one number; ``gsm8k``, the number after the last ``####``; ``boxed``, the last complete
            ``\\boxed{...}``.
        domain: Name for per-domain KL and metrics (``reward/correct/<domain>``), the same for all rows; ``null``: the
            column ``fields.domain``.
        part: ``all`` rows, or those that ``heldout_fraction`` leaves to ``train`` on or sets apart as ``heldout``. No
            question is in both.
        heldout_fraction: Share of all questions that is held out. Must be the same for both parts.
        limit: At most so many prompts, the first ones.

    Raises:
        ConfigError: For a column that is not there, a table without a single good row, or a part of it without one.
    """

    fields: Fields = field(default=Fields(), kw_only=True)
    extract: Extract = field(default="text", kw_only=True)
    domain: str | None = field(default=None, kw_only=True)
    part: Literal["all", "train", "heldout"] = field(default="all", kw_only=True)
    heldout_fraction: float = field(default=0.1, kw_only=True)
    limit: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Open the table and find the rows that can be asked."""
        self._check_settings()
        #: Rows that are asked, in the order of the data.
        self._kept = array("Q")
        #: How often the id of a row has been seen before it, where that is not never.
        self._repeats: dict[int, int] = {}
        self._rows = self.open({path.split(".")[0] for path in self._paths.values()} | set(self._paths.values()))
        self._find_rows()

    @abstractmethod
    def open(self, columns: set[str]) -> Rows:
        """Return the rows.

        Args:
            columns: What is going to be read of them: names that are no columns may be among these.
        """

    @property
    @abstractmethod
    def origin(self) -> str:
        """Where the rows come from, for messages."""

    def __len__(self) -> int:
        """Return how many rows are asked."""
        return len(self._kept)

    def prompt_id(self, index: int) -> str:
        """Return the id of prompt ``index``: without reading the row, where that is its place."""
        return self._rows.name(self._kept[index]) if self.fields.id is None else self[index].id

    def __getitem__(self, index: int) -> Prompt:
        """Return prompt ``index``, read again from the table."""
        if not 0 <= index < len(self):
            raise IndexError(f"`index` expected 0 to {len(self) - 1}, but got {index}")
        at = self._kept[index]
        (row,) = self._rows.read(at, at + 1)
        try:
            return self._prompt(at, row)
        except BadRow as error:
            raise ConfigError(
                f"`path` expected data that stay as they were when the run began, but got {error} in "
                f"{self._rows.where(at)} of {self.origin}: start the run again"
            ) from error

    @property
    def _paths(self) -> dict[str, str]:
        return self.fields.paths()

    def _check_settings(self) -> None:
        if self.domain is not None and self.fields.domain is not None:
            raise ConfigError(
                f"`domain` expected to be absent beside `fields.domain` ({self.fields.domain!r}), but got "
                f"{self.domain!r}: keep one of them"
            )
        if self.fields.answer is None and self.extract != "text":
            raise ConfigError(
                f"`extract` expected a column `fields.answer` to read, but got {self.extract!r} and no such column"
            )
        if self.part != "all" and not 0 < self.heldout_fraction < 1:
            raise ConfigError(
                f"`heldout_fraction` expected a number between 0 and 1, but got {self.heldout_fraction} for part "
                f"{self.part}: give both parts the same fraction, such as 0.1, or set `part: all`"
            )
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"`limit` expected at least 1, but got {self.limit}")

    # ------------------------------------------------------------------ opening

    def _find_rows(self) -> None:
        """Note which rows are asked, and report those that cannot be."""
        if self._rows.columns:
            self._check_columns(self._rows.columns)
        bad, ids, columns = Tally(), _Ids(), dict.fromkeys(self._rows.columns)
        domains: dict[str, None] = {}
        looked_at = 0
        for at, row in self._each():
            looked_at += 1
            if isinstance(row, BadRow):
                bad.add(str(row), self._rows.where(at))
                continue
            columns.update(dict.fromkeys(row))
            try:
                prompt = self._prompt(at, row)
            except BadRow as reason:
                bad.add(str(reason), self._named(at, row))
                continue
            if self.fields.id is not None and (repeat := ids.repeat(text_of(row, self.fields.id))):
                self._repeats[at] = repeat
            if self.part == "all" or is_heldout(prompt.question, self.heldout_fraction) == (self.part == "heldout"):
                self._kept.append(at)
                domains[prompt.domain] = None
            if len(self._kept) == self.limit:
                break
        if columns:
            self._check_columns(columns)
        self._report(bad, looked_at, columns)
        self.domains = tuple(domains)

    def _each(self) -> Iterator[tuple[int, Row | BadRow]]:
        for start in range(0, len(self._rows), CHUNK):
            yield from enumerate(self._rows.read(start, min(start + CHUNK, len(self._rows))), start)

    def _check_columns(self, columns: Iterable[str]) -> None:
        """Refuse a column that no row has: it is a misspelt one."""
        names = list(columns)
        for what, path in self._paths.items():
            if path not in names and path.split(".")[0] not in names:
                close = difflib.get_close_matches(path, names, n=3, cutoff=0.5)
                hint = f"did you mean {' or '.join(close)}? " if close else ""
                raise ConfigError(
                    f"`fields.{what}` expected a column of {self.origin}, but got {path!r}: {hint}{_listed(names)}"
                )

    def _report(self, bad: Tally, looked_at: int, columns: Iterable[str]) -> None:
        if not looked_at:
            raise ConfigError(f"`path` expected a table with rows, but got {self.origin}, which has none")
        if bad.total == looked_at:
            fields = ", ".join(f"{what}: {path}" for what, path in self._paths.items())
            raise ConfigError(
                f"`fields` expected columns of {self.origin} that hold questions and answers, but got {{{fields}}} "
                f"with `extract: {self.extract}`, and all {looked_at} rows are bad: {bad}. {_listed(columns)}"
            )
        if not self._kept:
            raise ConfigError(
                f"`part` expected rows of {self.origin} to be in it, but got {self.part}, which has none of "
                f"{looked_at - bad.total}: change `heldout_fraction` ({self.heldout_fraction}) in both parts"
            )
        if bad.total:
            rank_zero_warn(f"{self.origin}: {bad.total} of {looked_at} rows are bad and left out: {bad}")
        if self._repeats:
            first = next(iter(self._repeats))
            rank_zero_warn(
                f"{self.origin}: {len(self._repeats)} rows repeat an id of `fields.id` ({self.fields.id}), the first "
                f"in {self._rows.where(first)}: repeats are told apart by #1, #2, ... at the end"
            )

    # ------------------------------------------------------------------ one row

    def _named(self, at: int, row: Row) -> str:
        """Return where a row stands, with its own id where it has one."""
        place = self._rows.where(at)
        if self.fields.id is None:
            return place
        try:
            return f"{place} with id {text_of(row, self.fields.id)}"
        except BadRow:  # the id may be what is wrong with it
            return place

    def _id(self, at: int, row: Row) -> str:
        return self._rows.name(at) if self.fields.id is None else text_of(row, self.fields.id)

    def _prompt(self, at: int, row: Row | BadRow) -> Prompt:
        """Return the prompt that a row holds.

        Raises:
            BadRow: Where it holds none.
        """
        if isinstance(row, BadRow):
            raise row
        name = self._id(at, row)
        if at in self._repeats:
            name = f"{name}#{self._repeats[at]}"
        question = text_of(row, self.fields.question)
        answer = None
        if self.fields.answer is not None:
            answer = ground_truth(text_of(row, self.fields.answer), self.extract)
        domain = self.domain or "default"
        if self.fields.domain is not None:
            domain = text_of(row, self.fields.domain)
        metadata = {key: plain(cell(row, path)) for key, path in self.fields.metadata.items()}
        return Prompt(id=name, question=question, answer=answer, domain=domain, metadata=metadata)


def _listed(columns: Iterable[str]) -> str:
    if names := ", ".join(columns):
        return f"Its columns are {names}"
    return "None has named columns: JSON files hold an array of objects, or one object per line"


class _Ids:
    """Ids seen so far."""

    def __init__(self) -> None:
        self._repeats: dict[str, int] = {}

    def repeat(self, name: str) -> int:
        """Return 0 for a new id, else the number k that makes ``name#k`` one."""
        if name not in self._repeats:
            self._repeats[name] = 0
            return 0
        k = self._repeats[name] + 1
        while f"{name}#{k}" in self._repeats:
            k += 1
        self._repeats[name] = k
        self._repeats[f"{name}#{k}"] = 0
        return k
