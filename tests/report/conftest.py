"""Event files of runs that were never made."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

Write = Callable[[str, Mapping[str, Mapping[int, float]]], Path]

ACCURACY = "val/sums/greedy"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """``write("plain/version_0", {"reward/correct": {0: 0.1}})``: another event file of a run, and its folder."""
    files = 0

    def make(name: str, metrics: Mapping[str, Mapping[int, float]]) -> Path:
        nonlocal files
        folder = tmp_path / name
        # Files are read in the order of their names, which begin with the time; these are made within one second.
        with SummaryWriter(folder, filename_suffix=f".{files}") as writer:
            for metric, values in metrics.items():
                for step, value in values.items():
                    writer.add_scalar(metric, value, step)
        (made,) = [file for file in folder.iterdir() if file.name.endswith(f".{files}")]
        files += 1
        made.rename(folder / f"events.out.tfevents.{1000 + files}.test")
        return folder

    return make


@pytest.fixture
def run(write: Write) -> Path:
    """A run of three steps."""
    metrics = {f"system/time_{name}": dict.fromkeys(range(3), float(seconds)) for name, seconds in SECONDS.items()}
    metrics["reward/correct"] = {step: 0.1 * step for step in range(3)}
    metrics["system/tokens_sampled"] = {0: 100.0, 1: 250.0, 2: 400.0}
    metrics[ACCURACY] = {0: 0.25, 2: 0.5, 3: 0.75}
    return write("plain/version_0", metrics)


SECONDS = {"rollout": 6, "learn": 3, "sync": 0.5, "step": 10}
