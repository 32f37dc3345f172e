"""What an ablation compares, from a YAML file."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from grpo_lit.errors import ConfigError
from grpo_lit.report.record import flattened

#: What each run gets of its own: no overlay and no override may set it.
RESERVED = ("seed_everything", "data.seed", "trainer.logger", "ckpt_path")

#: A configuration file, or what would stand in one.
Part = str | dict[str, Any]


@dataclass(frozen=True)
class Spec:
    """An ablation.

    Attributes:
        base: Configurations of the baseline, later ones win; paths are relative to where the command is run.
        overlays: What each change adds, by its name, in the order of the cumulative runs.
        seeds: Of initialisation, prompt order and sampling; each run is made with each.
        metric: Held-out accuracy that is compared.
        output: Folder of the runs and tables.
        baseline: Name of the runs without any change.
        over: Cumulative count at whose equal values runs are compared too.
        together: Whether changes are made one after the other too; not where they exclude each other.
    """

    base: list[Part]
    overlays: dict[str, list[Part]]
    seeds: list[int]
    metric: str
    output: Path
    baseline: str = "baseline"
    over: str = "system/tokens_sampled"
    together: bool = True

    def combinations(self) -> list[tuple[str, ...]]:
        """Return the sets of changes to run: none, each alone, and, ``together``, the first two, the first three ..."""
        names = tuple(self.overlays)
        alone, together = [(name,) for name in names], [names[:count] for count in range(2, len(names) + 1)]
        return [(), *alone, *(together if self.together else ())]

    def title(self, combination: Sequence[str]) -> str:
        """Return what a combination is called in tables."""
        return " ".join(f"+ {name}" for name in combination) or self.baseline


def slug(combination: Sequence[str]) -> str:
    """Return a combination's folder."""
    return "+".join(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") for name in combination) or "baseline"


def load_spec(file: Path) -> Spec:
    """Read and check a specification.

    Raises:
        ConfigError: It cannot work; the message names the key.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`spec` expected a YAML file, but got {file}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"`spec` expected YAML, but {file} cannot be parsed: {error}") from error
    known = {field.name for field in fields(Spec)}
    if (
        not isinstance(content, dict)
        or not {"base", "overlays", "seeds", "metric", "output"} <= content.keys() <= known
    ):
        keys = ", ".join(map(str, content)) if isinstance(content, dict) else repr(content)
        raise ConfigError(
            f"`spec` expected base, overlays, seeds, metric, output (and baseline, over, together), but got {keys}"
        )
    if not isinstance(content["overlays"], dict) or not content["overlays"]:
        raise ConfigError(f"`overlays` expected changes by name, but got {content['overlays']!r}")
    for key in ("metric", "output", "baseline", "over"):
        if not isinstance(content.get(key, ""), str):
            raise ConfigError(f"`{key}` expected text, but got {content[key]!r}")
    if not isinstance(content.get("together", True), bool):
        raise ConfigError(f"`together` expected true or false, but got {content['together']!r}")
    if not content["metric"].startswith("val/"):
        raise ConfigError(
            f"`metric` expected a held-out accuracy such as val/<set>/greedy, but got {content['metric']}"
        )
    overlays = {str(name): _parts(f"overlays.{name}", value) for name, value in content["overlays"].items()}
    _check_overlays(overlays)
    return Spec(
        **content | {"base": _parts("base", content["base"]), "overlays": overlays, "output": Path(content["output"])}
        | {"seeds": checked_seeds(content["seeds"])}
    )  # fmt: skip


def checked_seeds(seeds: Any) -> list[int]:
    """Return seeds that are distinct whole numbers.

    Raises:
        ConfigError: They are not.
    """
    whole = isinstance(seeds, list) and all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"`seeds` expected distinct whole numbers >= 0, but got {seeds!r}")
    return seeds


def _parts(key: str, value: Any) -> list[Part]:
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if not (isinstance(part, str | dict) and part):
            raise ConfigError(f"`{key}` expected files, or settings as in one, but got {part!r}")
        if isinstance(part, str):
            settings_of(part, key)
    if not parts:
        raise ConfigError(f"`{key}` expected at least one file, but got none")
    return parts


def settings_of(part: Part, key: str = "base") -> dict[str, Any]:
    """Return the settings of a part.

    Raises:
        ConfigError: It is a file that cannot be read.
    """
    if not isinstance(part, str):
        return part
    try:
        content = yaml.safe_load(Path(part).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"`{key}` expected a YAML file, but got {part}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"`{key}` expected a YAML file of settings, but got {part}, which has none")
    return content


def _check_overlays(overlays: Mapping[str, list[Part]]) -> None:
    folders: dict[str, str] = {}
    for name, parts in overlays.items():
        folder = slug([name])
        if folder in ("", "baseline") or folder in folders:
            other = f", as for {folders[folder]!r}" if folder in folders else ""
            raise ConfigError(f"`overlays` expected names that make folders, but {name!r} makes {folder!r}{other}")
        folders[folder] = name
        for key in (key for part in parts for key, _ in flattened(settings_of(part))):
            if key.startswith(RESERVED):
                raise ConfigError(f"`overlays.{name}` expected no `{key}`: each run of an ablation gets its own")


def checked_overrides(words: Sequence[str]) -> list[str]:
    """Return command-line words for every run.

    Raises:
        ConfigError: They set what each run gets of its own.
    """
    for word in words:
        key = word.lstrip("-").split("=")[0]
        if word.startswith("-") and key.startswith(RESERVED):
            raise ConfigError(f"what follows `--` expected no `{key}`: each run of an ablation gets its own")
    return list(words)


def fingerprint_of(spec: Spec, combination: Sequence[str], overrides: Sequence[str]) -> str:
    """Return all settings that two runs must share to stand in one table, as text."""
    parts = [*spec.base, *(part for name in combination for part in spec.overlays[name])]
    return json.dumps([[settings_of(part) for part in parts], list(overrides)], sort_keys=True, default=str)
