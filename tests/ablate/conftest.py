"""Specifications of ablations, and event files as their runs would leave them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.utils.tensorboard import SummaryWriter

from grpo_lit.ablate.cells import Cell
from grpo_lit.ablate.spec import Spec, load_spec

METRIC = "val/letters/greedy"
CONTENT = {
    "base": ["base.yaml", {"trainer": {"max_steps": 2}}],
    "overlays": {"Clip higher": {"model": {"x": 1}}, "tokens": ["over.yaml"]},
    "seeds": [0, 1],
    "metric": METRIC,
    "output": "out",
    "baseline": "GRPO",
}


@pytest.fixture
def make_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Spec]:
    """``make_spec(seeds=[3])``: a specification with these changes, read from a file in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text("model: {checkpoint: m}\n")
    Path("over.yaml").write_text("model: {y: 2}\n")

    def make(**changes: Any) -> Spec:
        content = {key: value for key, value in {**CONTENT, **changes}.items() if value is not None}
        Path("spec.yaml").write_text(yaml.safe_dump(content))
        return load_spec(Path("spec.yaml"))

    return make


@pytest.fixture
def log() -> Callable[[Cell, Mapping[int, float]], None]:
    """``log(cell, {0: 0.1, 2: 0.5})``: the events of a run with these accuracies, 100 tokens a step."""

    def write(cell: Cell, accuracies: Mapping[int, float], tokens: float = 100.0) -> None:
        with SummaryWriter(cell.folder) as writer:
            for step, value in accuracies.items():
                writer.add_scalar(METRIC, value, step)
            for step in range(max(accuracies)):
                writer.add_scalar("system/tokens_sampled", tokens * (step + 1), step)
                writer.add_scalar("system/time_step", 30.0, step)

    return write
