"""Labelled completions from a JSONL file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_lit.errors import ConfigError
from grpo_lit.rollout import Completion, Prompt

_LABELS = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}


@dataclass
class Fields:
    """Which field of a row holds what.

    Args:
        question: The question.
        answer: The gold answer.
        completion: The text to judge.
        label: Whether it is correct: true or false, or 1 or 0.
        id: Name of the row; its line number where it has none.
        metadata: What the reward reads of ``Prompt.metadata``; nothing where a row has none.
    """

    question: str = "question"
    answer: str = "gold"
    completion: str = "completion"
    label: str = "correct"
    id: str = "id"
    metadata: str = "metadata"


@dataclass(frozen=True)
class Sample:
    """One completion and whether it is correct."""

    prompt: Prompt
    text: str
    correct: bool


def completion(text: str) -> Completion:
    """Return a completion of which only the text is known."""
    return Completion((), (), text, "stop", 0)


def read_samples(file: Path, fields: Fields) -> list[Sample]:
    """Return the rows of a JSONL file, blank lines apart.

    Raises:
        ConfigError: For a file that cannot be read or has no rows, and for a row that lacks a field.
    """
    try:
        with file.open("rb") as lines:  # str.splitlines would cut at characters that may stand in a JSON text
            numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    except OSError as error:
        raise ConfigError(f"`file` expected a JSONL file, but got {file}: {error.strerror}") from error
    samples = [_sample(line, f"{file.name} line {number}", number, fields) for number, line in numbered]
    if not samples:
        raise ConfigError(f"`file` expected labelled rows, but got {file}, which has none")
    return samples


def _sample(line: bytes, where: str, number: int, fields: Fields) -> Sample:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # malformed, bytes that are no text, or nested beyond reading
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise ConfigError(f"`file` expected a JSON object per line, but got in {where}: {reason}") from error
    if not isinstance(row, Mapping):
        raise ConfigError(f"`file` expected a JSON object per line, but got in {where}: {type(row).__name__}")
    names = asdict(fields)
    for part in ("question", "answer", "completion", "label"):
        if names[part] not in row:
            raise ConfigError(
                f"`fields.{part}` expected a field of the rows, but got {names[part]!r}, which {where} lacks: it has "
                f"{', '.join(map(repr, row))}"
            )
    label = row[fields.label]
    key = label.lower() if isinstance(label, str) else label
    if not isinstance(key, bool | int | str) or key not in _LABELS:
        raise ConfigError(f"`fields.label` expected true or false, but got {label!r} in {where}")
    prompt = Prompt(
        id=str(row.get(fields.id, number)),
        question=str(row[fields.question]),
        answer=None if row[fields.answer] is None else str(row[fields.answer]),
        metadata=dict(row.get(fields.metadata) or {}),
    )
    return Sample(prompt, str(row[fields.completion]), _LABELS[key])
