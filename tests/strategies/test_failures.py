"""Who is told of a failure, by whom, and what it costs; two real processes are in tests/runs/test_ranks.py."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed import HashStore

from grpo_lit.interrupts import Interrupted
from grpo_lit.strategies import failures
from grpo_lit.strategies.failures import FailureWatch, stop_at_same_step

MODULE = Mock(spec=LightningModule)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[FailureWatch, Any]]:
    """``watch(rank)``: a rank of two that look into one store ten times a second; for its trainer too."""
    store = HashStore()
    monkeypatch.setattr(failures, "_get_default_store", lambda: store)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(failures, "_LOOK", 0.1)

    def make(rank: int) -> tuple[FailureWatch, Any]:
        made = FailureWatch()
        made._run = "run"  # two processes count alike, one counts them apart
        return made, Mock(spec=Trainer, world_size=2, global_rank=rank, datamodule=Mock())

    return make


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set where a process would have been ended, which takes no time here."""
    event = threading.Event()
    monkeypatch.setattr(failures, "_GRACE", 0.2)
    monkeypatch.setattr(os, "_exit", lambda status: event.set())
    return event


def test_a_rank_that_waits_is_told_and_ended(
    watch: Callable, ended: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    (waiting, its), (failing, others) = watch(0), watch(1)
    waiting.setup(its, MODULE, "fit")
    failing.on_exception(others, MODULE, ValueError("no such answer"))
    assert ended.wait(5)
    said = capsys.readouterr().err
    assert "rank 1 failed, and ends the run" in said
    assert "ValueError: no such answer" in said
    its.datamodule.close.assert_called_once_with()


def test_a_rank_that_ends_by_itself_is_left_alone(
    watch: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("ended"))
    (second, its), (first, others) = watch(0), watch(1)
    second.setup(its, MODULE, "fit")
    first.on_exception(others, MODULE, ValueError("the cause"))  # returns when the other has read it
    second.on_exception(its, MODULE, RuntimeError("connection closed"))
    assert "the cause" in capsys.readouterr().err
    third, trainer = watch(0)
    third.setup(trainer, MODULE, "fit")
    third.teardown(trainer, MODULE, "fit")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted(signal.SIGTERM)])
def test_ctrl_c_and_sigterm_are_told_and_wait_for_nobody(
    error: BaseException, watch: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_GRACE", 60.0)
    started, (rank, trainer) = time.monotonic(), watch(0)
    rank.on_exception(trainer, MODULE, error)
    assert time.monotonic() - started < 5
    name = str(error) or "KeyboardInterrupt"
    assert failures._get_default_store().get("run/message").decode() == f"rank 0 was ended by {name}"
    trainer.strategy.launcher.kill.assert_called_once_with(signal.SIGTERM)  # the ranks it started save too


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("process", "fate"),
    [
        (None, "its process {pid} is there but held up: it was stopped, or something in it holds Python's lock"),
        (ended_process, "its process has ended"),
        ("elsewhere 1", "it was killed, its machine is gone, or something in it holds Python's lock"),
    ],
)
def test_a_rank_that_is_silent_is_not_waited_for_and_named(
    process: Any, fate: str, watch: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``kill -9``: the other finds its connection broken, and nobody to tell of it."""
    monkeypatch.setattr(failures, "_GRACE", 60.0)
    monkeypatch.setattr(failures, "_SILENCE", 0.5)
    (killed, its), (rank, trainer) = watch(1), watch(0)
    killed.setup(its, MODULE, "fit")
    time.sleep(0.2)
    killed._stop()  # without a word
    if process is not None:
        where = process if isinstance(process, str) else f"{socket.gethostname()} {process()}"
        failures._get_default_store().set("run/process/1", where)
    started = time.monotonic()
    rank.on_exception(trainer, MODULE, RuntimeError("connection closed"))
    assert 0.4 < time.monotonic() - started < 10
    assert f"rank 1 has not answered for 0.5 s: {fate.format(pid=os.getpid())}\n" in capsys.readouterr().err


def test_a_connection_that_broke_first_is_not_taken_for_the_cause(
    watch: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rank that failed is gone before the other has looked into the store."""
    monkeypatch.setattr(failures, "_GRACE", 0.0)
    (first, others), (second, its) = watch(1), watch(0)
    first.on_exception(others, MODULE, ValueError("the cause"))
    second.on_exception(its, MODULE, RuntimeError("connection closed"))
    said = capsys.readouterr().err
    assert "rank 1 failed, and ends the run" in said
    assert "ValueError: the cause" in said
    assert "not answered" not in said


def test_a_single_process_tells_nobody(watch: Callable) -> None:
    rank, _ = watch(0)
    rank.on_exception(Mock(spec=Trainer, world_size=1), MODULE, ValueError())
    assert not failures._get_default_store().check(["run/message"])


def test_whatever_ends_a_rank_is_told_and_the_watch_begins_with_the_data(
    watch: Callable, ended: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    (waiting, its), (failing, others) = watch(0), watch(1)
    its.callbacks = [Mock(spec=Callback), waiting]
    FailureWatch.begin(its)  # as the data module's set-up does
    first = waiting._thread
    waiting.setup(its, MODULE, "fit")  # as Lightning does afterwards
    assert waiting._thread is first
    failing.on_exception(others, MODULE, SystemExit(3))
    assert ended.wait(5)
    assert "SystemExit: 3" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "agree"), [((3, 3), True), ((3, 4), False), ((3, None), False)])
def test_ranks_save_together_only_where_all_were_stopped_after_the_same_step(
    steps: tuple[int | None, int | None], agree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    store, said = HashStore(), dict[int, bool]()

    def stop(rank: int, step: int) -> None:
        trainer = Mock(spec=Trainer, world_size=2, global_rank=rank, global_step=step)
        said[rank] = stop_at_same_step(trainer, store, patience=0.5)

    threads = [threading.Thread(target=stop, args=(r, step)) for r, step in enumerate(steps) if step is not None]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(said.values()) == {agree}
