"""Ctrl-C and SIGTERM: what is saved, what is said, the status, and no process that outlives the run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch
import yaml
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from overlay import tiny_overlay
from toys import EvenShare

from grpo_lit.cli import main
from grpo_lit.interrupts import Interrupted, ending_in_order, held_back, outcome_of, started_by_lightning

BASE = Path(__file__).parents[1] / "configs/base.yaml"


def send(number: int) -> None:
    """Send a signal to this process, and give Python the time to notice."""
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_raised_once_and_handlers_are_put_back(number, status, capfd):
    def run() -> None:
        try:
            send(number)
        finally:
            send(signal.SIGTERM)  # a launcher that insists, and one that passes on what the terminal has sent
            send(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as raised, ending_in_order():
        run()
    assert raised.value.status == status
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert capfd.readouterr().err.count("saving and ending") == 1


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ending_in_order():
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            send(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_must_not_be_done_by_half_is_done_first():
    done = []

    def step() -> None:
        with held_back():
            send(signal.SIGTERM)
            done.append("all of it")
        done.append("nothing more")

    with pytest.raises(Interrupted), ending_in_order():
        step()
    assert done == ["all of it"]


SLOW_TO_END = """
import subprocess, sys, time
from grpo_lit import interrupts
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
with interrupts.ending_in_order():
    try:
        print(child.pid, flush=True)
        time.sleep(60)
    finally:
        print("ending", flush=True)
        time.sleep(60)
"""


def test_a_second_ctrl_c_ends_everything_at_once():
    run = subprocess.Popen([sys.executable, "-c", SLOW_TO_END], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(run.stdout.readline()))
    run.send_signal(signal.SIGINT)
    assert run.stdout.readline() == "ending\n"
    time.sleep(0.6)
    run.send_signal(signal.SIGINT)
    assert run.wait(10) == 130
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE  # nobody may be there to reap it


class Signals(EvenShare):
    """EvenShare, and a signal to the run in the middle of its third rollout."""

    number = calls = 0

    def __call__(self, prompt, completions):
        Signals.calls += 1
        if Signals.calls == 9:
            Signals.calls += 1
            send(Signals.number)
        return super().__call__(prompt, completions)


#: One task of a job, in which Lightning would answer SIGUSR1 by saving at once and queueing the job again.
JOB = {"NTASKS": "1", "JOB_NAME": "some", "JOB_ID": "1", "LOCALID": "0", "NODEID": "0", "PROCID": "0", "NNODES": "1"}


@pytest.mark.parametrize(
    ("number", "status", "job"),
    [(signal.SIGINT, 130, {}), (signal.SIGTERM, 143, {}), (signal.SIGUSR1, 138, JOB)],
)
def test_a_run_saves_and_says_how_to_go_on(number, status, job, tmp_path, tiny_model_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    for name, value in job.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    before = signal.getsignal(signal.SIGUSR1)
    monkeypatch.setattr(sys.modules["toys"], "Signals", Signals, raising=False)
    monkeypatch.setattr(Signals, "__module__", "toys")
    Signals.number, Signals.calls = number, 0
    rewards = {"rewards": {"answer": {"reward": {"class_path": "toys.Signals"}}}, "correct": "answer"}
    overlay = tiny_overlay(tiny_model_path, {"max_steps": 4, "num_sanity_val_steps": 0}, rewards=rewards)
    Path("tiny.yaml").write_text(yaml.safe_dump(overlay))
    words = ["fit", "--config", str(BASE), "--config", "tiny.yaml"]
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == status
    assert signal.getsignal(signal.SIGUSR1) == before
    last = "runs/base/version_0/checkpoints/last.ckpt"
    *_, said = capsys.readouterr().err.splitlines()
    assert said.endswith(
        f": ended after step 2, the engine too; saved in {last}. To go on: the same command with --ckpt_path {last}"
    )
    assert "KeyboardInterrupt" not in caplog.text
    assert "was raised" not in caplog.text
    assert (
        torch.load(last, weights_only=True)["global_step"] == 2
    )  # from which a run goes on: tests/runs/test_resume.py


def trainer_at(step: int, doing: str = "fit", *checkpoints: tuple[int, str]) -> Trainer:
    parts = [Mock(_last_global_step_saved=at, last_model_path=path) for at, path in checkpoints]
    return Mock(spec=Trainer, global_step=step, state=Mock(fn=doing), checkpoint_callbacks=parts)


def test_the_outcome_tells_what_there_is():
    assert outcome_of(trainer_at(0, "validate")) == "validate ended, the engine too"
    assert "nothing to save" in outcome_of(trainer_at(0, "fit", (0, "")))
    assert outcome_of(trainer_at(5)).endswith("no `callbacks.ModelCheckpoint` was there to save it")
    assert "last saved at step 4 in b.ckpt" in outcome_of(trainer_at(5, "fit", (2, "a.ckpt"), (4, "b.ckpt")))


@pytest.mark.parametrize(("rank", "environment", "expected"), [(0, True, False), (1, True, True), (1, False, False)])
def test_ranks_of_lightnings_own_launcher_are_told_apart(rank, environment, expected):
    strategy = Mock(cluster_environment=Mock(spec=LightningEnvironment) if environment else Mock())
    assert started_by_lightning(Mock(spec=Trainer, global_rank=rank, strategy=strategy)) is expected
