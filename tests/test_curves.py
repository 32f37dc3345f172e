"""The picture of a run, and the figures printed with it, come from its event files."""

import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from grpo_lit import curves


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with SummaryWriter(tmp_path / "run") as writer:
        for step in range(3):
            writer.add_scalar("reward/correct", 0.1 * step, step)
            for name, seconds in {"rollout": 6, "learn": 3, "sync": 0.5, "step": 10}.items():
                writer.add_scalar(f"system/time_{name}", seconds, step)
        writer.add_scalar("val/sums/greedy", 0.25, 0)
        writer.add_scalar("val/sums/greedy", 0.75, 3)
    return tmp_path / "run"


def test_figures_and_picture(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    picture = tmp_path / "curves.png"
    monkeypatch.setattr(sys, "argv", ["curves", str(run), str(picture)])
    curves.main()
    out = capsys.readouterr().out
    assert "val/sums/greedy: 25.0% at step 0, 75.0% at step 3" in out
    assert "3 steps in 30 s, 90.0% in rollouts and learning" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_events_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["curves", str(tmp_path), "x.png"])
    with pytest.raises(SystemExit) as stop:
        curves.main()
    assert stop.value.code == 2
