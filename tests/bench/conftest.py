"""What the benchmark's tests share.

Nothing of grpo_lit is imported at the top: shapes are checked in modules that are imported after this file only.
"""

from pathlib import Path

import pytest


@pytest.fixture
def settings(tmp_path: Path):
    """The smallest run there is."""
    from grpo_lit.bench.settings import Settings

    return Settings(tiny=True, rounds=1, threads=1, precision="float32", json=tmp_path / "result.json")
