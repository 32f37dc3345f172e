"""Imported first by the scripts here: goes on with the Python of .venv where this one lacks what they need."""

import importlib.util
import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_PYTHON = _ROOT / os.environ.get("GRPO_LIT_VENV", ".venv") / "bin" / "python"

# Without .venv grpo_lit may be found all the same, in the current folder.
if any(importlib.util.find_spec(name) is None for name in ("grpo_lit", "lightning")):
    if not _PYTHON.exists() or Path(sys.executable) == _PYTHON:
        sys.exit("error: grpo_lit is not installed: run `scripts/setup` first")
    os.execv(_PYTHON, [str(_PYTHON), *sys.argv])
if "" not in sys.path:
    sys.path.insert(1, "")  # own parts in the current folder are found, as with grpo-lit
