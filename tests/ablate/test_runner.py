"""Runs as processes: some at a time, failures apart, Ctrl-C passed on, what is missing made and nothing else."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from overlay import tiny_overlay

from grpo_lit.ablate.cells import Cell, cells_of
from grpo_lit.ablate.cli import main
from grpo_lit.ablate.runner import Runner, locked, span
from grpo_lit.errors import ConfigError

ROOT = Path(__file__).parents[2]

#: Says that it has begun, and saves when it is asked to stop.
PATIENT = """
import pathlib, signal, sys
def save(*_):
    pathlib.Path("saved").touch()
    sys.exit(1)
signal.signal(signal.SIGINT, save)
open("begun", "w").close()
signal.pause()
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Cell], str]], None]:
    """``stand_in(lambda cell: code)``: Python code stands for each run."""

    def replace(code: Callable[[Cell], str]) -> None:
        monkeypatch.setattr(Cell, "command", lambda cell: [sys.executable, "-c", code(cell)])

    return replace


def test_only_what_is_missing_is_run_and_a_failure_stops_no_other(
    make_spec: Callable, log: Callable, stand_in: Callable, capfd: pytest.CaptureFixture[str]
) -> None:
    make_spec(seeds=[0])
    cells = cells_of(make_spec(seeds=[0]), [])
    for cell in cells:
        log(cell, {0: 0.1, 2: 0.5})
    cells[0].finish(keep_checkpoints=False)
    bad = cells[2].title
    stand_in(lambda cell: "print('error: no such model'); exit(2)" if cell.title == bad else "print('fine')")
    assert main(["spec.yaml", "--jobs", "2"]) == 1
    out, err = capfd.readouterr()
    assert "+ tokens, seed 0: failed (2): error: no such model" in out
    assert "GRPO, seed 0: starts" not in out
    assert "[4/4]" in out
    assert "failed: + tokens, seed 0" in err
    assert [cell.result() is not None for cell in cells] == [True, True, False, True]
    assert (cells[1].folder / "log.txt").read_text() == "fine\n"
    assert "| + tokens | 0 |" in Path("out/table.md").read_text()
    # Again: the failed one alone is left.
    stand_in(lambda cell: "")
    assert main(["spec.yaml"]) == 0
    assert capfd.readouterr().out.count("starts; log") == 1


def test_ctrl_c_lets_runs_save_and_leaves_none_behind(make_spec: Callable, stand_in: Callable) -> None:
    cells = cells_of(make_spec(seeds=[0]), [])[:1]
    os.mkfifo("begun")
    stand_in(lambda cell: PATIENT)
    said = []

    def say(line: str) -> None:
        said.append(line)
        if "starts" in line:
            Path("begun").read_text()  # until the process is ready to be interrupted
            os.kill(os.getpid(), signal.SIGINT)

    with locked(Path("out")) as lock, pytest.raises(KeyboardInterrupt):
        Runner(1, say, False, lock).run(cells, lambda: None)
    assert Path("saved").exists()
    assert cells[0].result() is None
    assert "Ctrl-C again" in said[-1]


def test_a_folder_has_one_ablation_at_a_time(make_spec: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    make_spec()
    with locked(Path("out")), pytest.raises(ConfigError, match="has an ablation running"), locked(Path("out")):
        pass
    # A run that outlives its ablation keeps the folder.
    with locked(Path("out")) as lock:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    assert main(["spec.yaml"]) == 2
    assert "has an ablation running" in capsys.readouterr().err
    process.communicate(b"\n")
    with locked(Path("out")):
        pass


@pytest.mark.parametrize("arguments", [["--jobs", "0"], ["--seeds", "1", "1"], ["--", "--data.seed", "3"]])
def test_mistakes(arguments: list[str], make_spec: Callable, capsys: pytest.CaptureFixture[str]) -> None:
    make_spec()
    assert main(["spec.yaml", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not Path("out").exists()


def test_a_dry_run_prints_the_commands_that_are_left(
    make_spec: Callable, log: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = cells_of(make_spec(), [])
    log(cells[0], {0: 0.1, 2: 0.5})
    cells[0].finish(keep_checkpoints=False)
    assert main(["spec.yaml", "--dry-run", "--seeds", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["# 1 of 4 runs are finished", "# + Clip higher, seed 0"]
    assert all("-m grpo_lit fit --config base.yaml" in line for line in lines[2::2])
    assert len(lines) == 1 + 2 * 3


@pytest.mark.parametrize(("seconds", "text"), [(12.0, "12 s"), (600.0, "10 min"), (7500.0, "2 h 5 min")])
def test_times(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_real_runs_are_made_and_a_missing_one_goes_on(
    tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The whole path: two runs of a tiny model, then one of them again from its checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests/helpers'}")
    overlay = {"model": {"objective": {"reduction": {"class_path": "TokenMean"}}}}
    tiny = tiny_overlay(tiny_model_path, {"val_check_interval": 1})
    spec = {"base": [str(ROOT / "configs/base.yaml"), tiny], "overlays": {"token mean": overlay}}
    spec |= {"seeds": [7], "metric": "val/letters/greedy", "output": "out"}
    Path("spec.yaml").write_text(yaml.safe_dump(spec))
    arguments = ["spec.yaml", "--jobs", "2", "--keep_checkpoints", "--", "--trainer.max_steps", "2"]
    assert main(arguments) == 0, next(tmp_path.rglob("log.txt")).read_text()
    assert "| + token mean | 1 |" in Path("out/table.md").read_text()
    folder = Path("out/baseline/seed_7")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["seed_everything"], config["data"]["seed"]) == (7, 7)
    noted = json.loads((folder / "versions.json").read_text())
    assert noted["held_out_prompts"] == {"letters": 2}
    assert noted["versions"]["torch"] == importlib.metadata.version("torch")
    (folder / "result.json").unlink()
    capfd.readouterr()
    assert main(arguments) == 0
    out = capfd.readouterr().out
    assert "[2/2] baseline, seed 7: goes on" in out
    assert "+ token mean, seed 7: " not in out
    assert (folder / "result.json").exists()
