"""Recipes as the command line reads them, and the estimators of the KL that the lab compares."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from grpo_lit.errors import ConfigError
from grpo_lit.objectives import K1, K2, K3, ConstantLength, GroupAdvantage, Objective


def load_objective(path: Path, max_length: int) -> Objective:
    """Return the objective of a recipe file, parsed as ``grpo-lit fit`` parses it.

    Args:
        path: A YAML file with ``model.objective``.
        max_length: Replaces the length of ``ConstantLength``, which is the most tokens of a completion: of the lab's.
    """
    settings = yaml.safe_load(path.read_text())
    if not isinstance(settings, dict) or "objective" not in (settings.get("model") or {}):
        raise ConfigError(f"`recipes` expected files with a key model.objective, but got {path}: name a recipe's YAML")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--objective", type=Objective)
    try:
        parsed = parser.parse_object({"objective": settings["model"]["objective"]})
    except ArgumentError as error:
        raise ConfigError(f"`recipes` expected parts that exist, but got {path}: {error}") from error
    objective = parser.instantiate_classes(parsed).objective
    if isinstance(objective.reduction, ConstantLength):
        objective.reduction = replace(objective.reduction, length=max_length)
    return objective


def load_recipes(paths: Sequence[Path], max_length: int) -> dict[str, Objective]:
    """Return the objectives of recipe files, and of all files in folders, by the name of their file."""
    files = [file for path in paths for file in (sorted(path.glob("*.yaml")) if path.is_dir() else [path])]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"`recipes` expected YAML files or folders of them, but got {', '.join(map(str, paths))}")
    return {file.stem: load_objective(file, max_length) for file in files}


def kl_estimators() -> dict[str, Objective]:
    """Return objectives whose only pull, where all rewards are equal, is one estimate of the KL in the loss."""
    return {
        part.__name__.lower() + ("" if weighting == "none" else " x ratio"): Objective(
            GroupAdvantage("none"), reduction=ConstantLength(1), divergence=part(beta=1.0, weighting=weighting)
        )
        for weighting in ("none", "ratio")
        for part in (K1, K2, K3)
    }
