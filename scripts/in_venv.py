"""Imported first by the scripts here: goes on with the Python of .venv where this one has no grpo_lit."""

import importlib.util
import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_PYTHON = _ROOT / os.environ.get("GRPO_LIT_VENV", ".venv") / "bin" / "python"

if importlib.util.find_spec("grpo_lit") is None:
    if not _PYTHON.exists() or Path(sys.executable) == _PYTHON:
        sys.exit("error: grpo_lit is not installed: run `bash scripts/setup` first")
    os.execv(_PYTHON, [str(_PYTHON), *sys.argv])
