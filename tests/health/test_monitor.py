"""Episodes are told once, after a resume too, and the same from values in memory and from files."""

from pathlib import Path

import pytest
from synthetic import SICK, healthy
from torch.utils.tensorboard import SummaryWriter

from grpo_lit.curves import read_scalars
from grpo_lit.health import Event, History, Monitor, Rules, diagnose
from grpo_lit.health.exploration import EntropyCollapse
from grpo_lit.health.monitor import REST

ENTROPY = "exploration/entropy"


def events_of(values: list[float]) -> list[int]:
    run = {ENTROPY: (list(range(len(values))), values)}
    return [event.step for event in diagnose(run, [EntropyCollapse(window=1)])]


def test_an_episode_is_told_once_and_a_second_one_again() -> None:
    assert events_of([0.5, 0.01, 0.5, 0.01, 0.01]) == [1]  # still the same one
    assert events_of([0.5, 0.01] + [0.5] * (REST - 1) + [0.01]) == [1]
    assert events_of([0.5, 0.01] + [0.5] * REST + [0.01]) == [1, 2 + REST]


def test_nothing_new_is_no_look() -> None:
    monitor = Monitor([EntropyCollapse(window=1)])
    monitor.add(0, {ENTROPY: 0.01, "length/mean": 3.0})
    assert [event.step for event in monitor.look()] == [0]
    for step in range(1, 2 * REST):
        monitor.add(step, {"length/mean": 3.0})  # no rule here reads it
        assert monitor.look() == []
    monitor.add(2 * REST, {ENTROPY: 0.01})
    assert monitor.look() == []
    assert monitor.history.names() == [ENTROPY]


def by_step(run: dict, step: int) -> dict[str, float]:
    return {name: values[steps.index(step)] for name, (steps, values) in run.items() if step in steps}


@pytest.mark.parametrize("stop", [30, 64, 110])
def test_a_resumed_run_tells_what_an_unbroken_one_tells(stop: int) -> None:
    run = healthy(0)
    for _, _, make_sick in [SICK["entropy falls"], SICK["verifier killed"], SICK["wrong answers grow"]]:
        run = make_sick(run)
    first, told = Monitor(Rules().active()), list[Event]()
    for step in range(stop + 7):
        first.add(step, by_step(run, step))
        told += first.look()
        if step == stop - 1:
            state, kept = first.state_dict(), list(told)  # the checkpoint
    second = Monitor(Rules().active())
    second.load_state_dict(state)
    for step in range(stop, 161):
        second.add(step, by_step(run, step))
        kept += second.look()
    assert kept == diagnose(run, Rules().active())
    assert len(kept) == 3


def test_files_tell_what_memory_told(tmp_path: Path) -> None:
    run = SICK["form without content"][2](SICK["engine and learner apart"][2](healthy(1)))
    with SummaryWriter(tmp_path) as writer:
        for name, (steps, values) in run.items():
            for step, value in zip(steps, values, strict=True):
                writer.add_scalar(name, value, step)
    told = diagnose(read_scalars(tmp_path), Rules().active())
    assert told == diagnose(run, Rules().active())
    assert len(told) == 2


def test_history_keeps_finite_values_as_files_hold_them() -> None:
    history = History()
    history.add(0, {"a": 0.8, "b": float("nan"), "c": float("inf")})
    history.add(1, {"a": 0.1 + 0.2})
    assert history.points("a") == ([0, 1], [0.8, 0.3])
    assert history.names() == ["a"]
    history.add(0, {"a": 0.7})  # resumed: what came after is forgotten
    assert history.points("a") == ([0], [0.7])


def test_windows_are_whole_or_empty() -> None:
    history = History()
    for step in range(4):
        history.add(2 * step, {"a": float(step)})
    assert history.newest("a", 3) == [1.0, 2.0, 3.0]
    assert history.newest("a", 3, before=1) == [0.0, 1.0, 2.0]
    assert history.newest("a", 4, before=1) == history.newest("b", 1) == history.oldest("a", 5) == []
    assert history.oldest("a", 2) == [0.0, 1.0]
    assert history.between("a", 2, 4) == [1.0, 2.0]
    assert (history.last_step, History().last_step) == (6, -1)
