"""What a run left in its folder: scalars, health events, samples, configuration, versions."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_lit.errors import ConfigError
from grpo_lit.health import Rules, diagnose
from grpo_lit.report.events import Scalars, read_scalars, run_folder
from grpo_lit.versions import VERSIONS_FILE


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        name: What tells it from the other runs.
        folder: Where it logs to.
        scalars: Its metrics.
        health: Lines of ``health.jsonl``, or what the rules find in the scalars of a run that did not watch itself.
        watched: Whether it did.
        samples: Lines of ``samples.jsonl``.
        config: Text of ``config.yaml``; empty if it has none.
        versions: Of Python and packages; empty if not recorded.
        held_out_prompts: Prompts of each held-out set, where known.
        unreadable: Files with lines or content that could not be read, and how many.
    """

    name: str
    folder: Path
    scalars: Scalars
    health: list[dict[str, Any]]
    watched: bool
    samples: list[dict[str, Any]]
    config: str
    versions: dict[str, str]
    held_out_prompts: dict[str, int]
    unreadable: dict[str, int]

    def settings(self) -> dict[str, str]:
        """Return the configuration as dotted keys and values; what it cannot be read as is under no key."""
        return dict(flattened(_mapping(self.config)))


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read runs, each named by what tells its folder from the others'.

    Raises:
        ConfigError: One has no events, or is named twice.
    """
    found = [run_folder(folder) for folder in folders]
    for i, folder in enumerate(found):
        if folder.resolve() in [other.resolve() for other in found[:i]]:
            raise ConfigError(f"`run` expected each run once, but got {folder} twice")
    return [read_run(folder, name) for folder, name in zip(found, names_of(found), strict=True)]


def read_run(folder: Path, name: str) -> Run:
    """Read one run; what it did not write is empty."""
    unreadable: dict[str, int] = {}

    def lines(file: str) -> list[dict[str, Any]]:
        rows, bad = read_jsonl(folder / file)
        unreadable.update({file: bad} if bad else {})
        return rows

    config, scalars = _text(folder / "config.yaml"), read_scalars(folder)
    watched = (folder / "health.jsonl").is_file()
    noted = _mapping(_text(folder / VERSIONS_FILE))
    versions, counts = noted.get("versions"), noted.get("held_out_prompts")
    return Run(
        name,
        folder,
        scalars,
        lines("health.jsonl") if watched else [event.as_dict() for event in diagnose(scalars, Rules().active())],
        watched,
        lines("samples.jsonl"),
        config,
        {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {},
        {k: v for k, v in counts.items() if isinstance(v, int)} if isinstance(counts, dict) else _sizes(config),
        unreadable,
    )


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the shortest names that tell folders apart: their paths without the ends that all of them share."""
    parts = [list(folder.absolute().parts) for folder in folders]
    if len(parts) == 1:
        return ["/".join(parts[0][-2:])]
    while len({part[0] for part in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [part[1:] for part in parts]
    while len({part[-1] for part in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [part[:-1] for part in parts]
    return ["/".join(part) for part in parts]


def read_jsonl(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the JSON objects of a file's lines, and how many lines are none; nothing of a file that is missing."""
    rows, bad = [], 0
    for line in _text(file).split("\n"):  # a JSON text may hold other line separators
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            row = line
        if isinstance(row, dict):
            rows.append(row)
        elif row is not None:
            bad += 1
    return rows, bad


def flattened(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of nested mappings and lists with their dotted keys."""
    if isinstance(value, dict) and value:
        for name, part in value.items():
            yield from flattened(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        for i, part in enumerate(value):
            yield from flattened(part, f"{key}.{i}")
    elif key:
        yield key, json.dumps(value, ensure_ascii=False, default=str)


def _sizes(config: str) -> dict[str, int]:
    """Return what a configuration says of how many held-out prompts there are."""
    sources = _at(_mapping(config), "data", "val")
    sizes = {name: _at(source, "init_args", "size") for name, source in sources.items()} if sources else {}
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}
