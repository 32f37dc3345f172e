"""Which column of a row holds what."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_lit.data.rows import BadRow, Row


@dataclass(frozen=True)
class Fields:
    """Which column holds what.

    A dot goes into nested fields and lists: ``reward_model.ground_truth``, ``prompt.0.content``.

    Args:
        question: The question.
        answer: The ground truth; ``null`` where the rewards need none.
        id: A name of the row's own, which stays when rows are added or removed; ``null``: its place in the data.
        domain: Name for per-domain KL and metrics (``reward/correct/<domain>``).
        metadata: What rewards want besides, by the name they know it by, such as ``{tests: test_list}``.
    """

    question: str = "question"
    answer: str | None = "answer"
    id: str | None = None
    domain: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)

    def paths(self) -> dict[str, str]:
        """Return the columns by what they are for, unused ones left out."""
        paths = {name: getattr(self, name) for name in ("question", "answer", "id", "domain")}
        paths |= {f"metadata.{name}": path for name, path in self.metadata.items()}
        return {name: path for name, path in paths.items() if path is not None}


def cell(row: Row, path: str) -> Any:
    """Return the value at a path; ``None`` where the row has none.

    Args:
        row: The row.
        path: The name of a column, or names and list positions with dots between them.
    """
    if path in row:
        return row[path]
    value: Any = row
    for step in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value


def text_of(row: Row, path: str) -> str:
    """Return the text at a path, exactly as it is there; numbers as they are written.

    Args:
        row: The row.
        path: See :func:`cell`.

    Raises:
        BadRow: Where there is none, or something else.
    """
    value = cell(row, path)
    if value is None:
        raise BadRow(f"no `{path}`")
    if isinstance(value, str):
        if not value.strip():
            raise BadRow(f"an empty `{path}`")
        try:
            value.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair: JSON can write it, no tokenizer can read it
            raise BadRow(f"a `{path}` that is not valid Unicode") from error
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow(f"a `{path}` of type {type(value).__name__}, which is no text")
    if not math.isfinite(value):
        raise BadRow(f"a `{path}` that is not finite")
    return str(value)
