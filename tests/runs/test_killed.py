"""A run that is killed at random moments, most of them while it saves, always goes on from its last save.

``GRPO_LIT_KILLS=10 python -m pytest -n 0 -s tests/runs/test_killed.py -k fsdp2`` kills ranks of two ten times, every
second time anywhere in a step; ``GRPO_LIT_KILL_SEED`` draws other moments. What each kill left is printed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pair import REPO

from grpo_lit.strategies.checkpoint_io import AtomicCheckpointIO

#: Two ranks take long to start: their few kills are all aimed at saves.
KILLS = {name: int(os.environ.get("GRPO_LIT_KILLS", few)) for name, few in (("single", 10), ("fsdp2", 3))}
SEED = os.environ.get("GRPO_LIT_KILL_SEED", "0")


@pytest.mark.parametrize("strategy", KILLS)
def test_no_kill_costs_more_than_the_steps_since_the_last_save(
    strategy: str, tmp_path: Path, tiny_model_path: Path
) -> None:
    script = REPO / "tests/helpers/killed_run.py"
    paths = os.pathsep.join([str(REPO), str(REPO / "tests/helpers"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_model_path), str(tmp_path), strategy, SEED, str(KILLS[strategy])],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=max(400, 100 * KILLS[strategy]),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *kills, end = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert len(kills) == KILLS[strategy]
    print(f"{strategy}, seed {SEED}", *kills, end, sep="\n")
    assert end["status"] == 0, done.stderr[-3000:]
    saved = 0
    for told in [*kills, end]:  # each begins where the one before had got, or a step later
        (began,) = told["began"]
        assert saved <= began <= saved + 1
        saved = told["saved"]
    # Every second one was aimed at a write, and may have come too late.
    # A rank that is left alone in a save clears away what was written.
    during = [told for told in kills if any(name.endswith(".unfinished") for name in told["left"])]
    assert during, "no kill hit a save"
    assert all(told["ended"] for told in kills), "a rank went on without the other"
    last = tmp_path / "saved" / "last.ckpt"
    assert last.is_symlink()
    assert AtomicCheckpointIO().load_checkpoint(last)["global_step"] == end["saved"]
    names = sorted(entry.name for entry in (tmp_path / "saved").iterdir())
    assert names[0] == "last.ckpt", "what killed runs left was not swept"
    for name in names:  # a kill between a save and what makes it the last leaves one more that is whole
        AtomicCheckpointIO().load_checkpoint(tmp_path / "saved" / name)
