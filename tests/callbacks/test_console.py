"""The console says what accuracy was before, now and after, also across a resume."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from lightning.pytorch import LightningModule, Trainer

from callbacks import Console, ModelCheckpoint

MODULE = Mock(spec=LightningModule)


def trainer(step: int, **metrics: float) -> Any:
    names = {"greedy": "val/sums/greedy", "avg": "val/sums/avg@4", "length": "val/sums/length"}
    values = {names[name]: value for name, value in metrics.items()}
    return Mock(spec=Trainer, global_step=step, callback_metrics=values, log_dir="runs/x")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_accuracies_are_printed_and_compared(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    console = Console()
    console.on_validation_end(trainer(0, greedy=0.19, length=9.0), MODULE)
    assert lines(caplog) == ["step 0: val/sums/greedy 19.0%"]
    console.on_validation_end(trainer(20, greedy=0.485, avg=0.4), MODULE)
    assert lines(caplog) == ["step 20: val/sums/greedy 48.5%, val/sums/avg@4 40.0%"]
    console.on_fit_end(trainer(20), MODULE)
    assert lines(caplog)[0] == "val/sums/greedy: 19.0% before, 48.5% after (+29.5 points)"


def test_a_run_says_where_it_writes(caplog: pytest.LogCaptureFixture) -> None:
    """A resumed run writes into a folder of its own."""
    caplog.set_level("INFO")
    savers = [ModelCheckpoint("saved"), Mock()]
    for loggers, expected in (([Mock()], "logs: runs/x; checkpoints: "), ([], "checkpoints: ")):
        made = Mock(spec=Trainer, log_dir="runs/x", loggers=loggers, checkpoint_callbacks=savers)
        Console().on_fit_start(made, MODULE)
        assert lines(caplog) == [f"{expected}{Path('saved').resolve()}"]
    Console().on_fit_start(Mock(spec=Trainer, loggers=[], checkpoint_callbacks=[]), MODULE)
    assert lines(caplog) == []


def test_intervals_stand_in_brackets(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    made = trainer(0, greedy=0.485, avg=0.4, length=9.0)
    made.callback_metrics |= {"val/sums/maj@4": 0.5, "val/sums/pass@2": 0.625, "val/sums/truncated": 0.0}
    for name, ends in {"greedy": (0.415, 0.554), "pass@2": (0.5, 0.75), "length": (8.0, 9.5)}.items():
        made.callback_metrics |= {f"val/sums/{name}/ci_low": ends[0], f"val/sums/{name}/ci_high": ends[1]}
    for hook in (Console().on_validation_end, Console().on_test_end):
        hook(made, MODULE)
        assert lines(caplog) == [
            "step 0: val/sums/greedy 48.5% [41.5%, 55.4%], val/sums/avg@4 40.0%, val/sums/maj@4 50.0%, "
            "val/sums/pass@2 62.5% [50.0%, 75.0%]"
        ]


def test_a_resumed_run_remembers_its_beginning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(sys, "executable", "/opt/python/bin/python")
    first, second = Console(), Console()
    first.on_validation_end(trainer(0, greedy=0.1), MODULE)
    second.load_state_dict(first.state_dict())
    second.on_validation_end(trainer(40, greedy=0.5), MODULE)
    lines(caplog)
    second.on_fit_end(trainer(40), MODULE)
    assert lines(caplog) == [
        "val/sums/greedy: 10.0% before, 50.0% after (+40.0 points)",
        "curves: /opt/python/bin/tensorboard --logdir runs/x",
    ]


def test_nothing_measured_prints_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    Console().on_validation_end(trainer(0, greedy=float("nan")), MODULE)
    assert lines(caplog) == []


def test_an_old_measurement_is_not_sold_as_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    console = Console()
    console.on_validation_end(trainer(0, greedy=0.1), MODULE)
    console.on_fit_end(trainer(10), MODULE)
    assert "held-out accuracy was last measured at step 0 of 10" in lines(caplog)


def test_what_was_not_measured_before_is_not_called_before(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    console = Console()
    console.on_validation_end(trainer(20, greedy=0.4), MODULE)
    lines(caplog)
    console.on_fit_end(trainer(20), MODULE)
    assert lines(caplog)[0] == "val/sums/greedy: 40.0% after"


def test_what_comes_before_the_first_step_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    made = trainer(20)
    made.datamodule = Mock(val={"a": range(200), "b": range(5)}, prompts_per_rollout=32, sampling=Mock(completions=16))
    Console().on_sanity_check_start(made, MODULE)
    Console().on_train_start(made, MODULE)
    assert lines(caplog) == [
        "before step 1: 205 held-out questions are answered",
        "step 21 begins with a rollout: 32 prompts, 16 answers each",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_log_file_has_a_line_per_step(
    terminal: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(sys, "stdout", Mock(isatty=lambda: terminal))
    made = Mock(spec=Trainer, global_step=3, callback_metrics={"reward/total": 0.25, "length/mean": 4.0})
    Console().on_train_batch_end(made, MODULE, None, None, 0)
    assert lines(caplog) == ([] if terminal else ["step 3: reward 0.25, length 4.0"])
