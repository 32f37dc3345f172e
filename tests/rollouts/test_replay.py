"""The replay buffer: whole groups, bounded in number, age and use."""

from typing import Any

import pytest

from grpo_lit.errors import ConfigError
from grpo_lit.rollout import Completion, Group, Prompt
from grpo_lit.rollouts.replay import Entry, Replay, ReplayBuffer


def group(name: str, rewards: list[float | None], correct: list[bool | None] | None = None, version: int = 0) -> Group:
    samples = tuple(Completion((5, 2), (-0.5, -0.25), "x", "stop", version) for _ in rewards)
    flags = [None if r is None else r > 0.5 for r in rewards] if correct is None else correct
    return Group(Prompt(name, name, token_ids=(1,)), 0, samples, rewards=rewards, correct=flags)


def filled(*rows: tuple[int, int, float], **settings: Any) -> ReplayBuffer:
    """A buffer of (serial, version, priority)."""
    buffer = ReplayBuffer(Replay(**settings))
    buffer.add([Entry(*row) for row in rows], {row[0]: group(str(row[0]), [0.0, 1.0]) for row in rows})
    return buffer


def test_priority_is_spread_times_how_hard() -> None:
    # std of 0 0 0 1 is .5, a quarter is solved: .5 * .75^.5; std of 0 1 is .707, half is solved.
    settings = Replay(hardness=0.5)
    assert settings.priority(group("a", [0.0, 0.0, 0.0, 1.0])) == pytest.approx(0.5 * 0.75**0.5)
    assert Replay(hardness=0.0).priority(group("a", [0.0, 1.0, None])) == pytest.approx(0.5**0.5)
    assert settings.priority(group("a", [1.0, 1.0])) == 0.0
    assert settings.priority(group("a", [1.0, None])) == 0.0
    assert settings.priority(group("a", [0.0, 1.0], correct=[None, None])) == pytest.approx(0.5**0.5)


def test_the_most_wanted_come_first_and_the_newest_of_equals() -> None:
    buffer = filled((0, 3, 0.5), (1, 3, 0.7), (2, 3, 0.5), (3, 3, 0.1))
    entries, groups = buffer.take(3, version=4)
    assert [entry.serial for entry in entries] == [1, 2, 0]
    assert {serial: g.prompt.id for serial, g in groups.items()} == {1: "1", 2: "2", 0: "0"}
    assert len(buffer) == 1  # one use each
    assert [entry.serial for entry in buffer.take(9, version=4)[0]] == [3]
    assert buffer.take(9, version=4) == ([], {})


# Field bug D3.
def test_capacity_counts_groups_and_the_least_wanted_make_room() -> None:
    buffer = filled((0, 0, 0.5), (1, 0, 0.2), (2, 0, 0.5), (3, 0, 0.5), capacity=2)
    assert [entry.serial for entry in buffer.take(4, version=0)[0]] == [3, 2]  # ties: the oldest went


def test_age_is_bounded() -> None:
    buffer = filled((0, 1, 0.9), (1, 4, 0.1), max_age=3)
    assert buffer.mean_age(4) == 1.5
    assert [entry.serial for entry in buffer.take(2, version=5)[0]] == [1]  # 5 - 1 > 3
    buffer = filled((0, 1, 0.9), max_age=3)
    assert len(buffer.take(1, version=4)[0]) == 1


def test_uses_are_bounded() -> None:
    buffer = filled((0, 0, 0.9), (1, 0, 0.5), max_uses=2)
    assert [[e.serial for e in buffer.take(1, version=0)[0]] for _ in range(5)] == [[0], [0], [1], [1], []]


def test_a_rank_without_the_group_knows_of_it_and_holds_nothing() -> None:
    buffer = ReplayBuffer(Replay(capacity=2))
    buffer.add([Entry(0, 0, 0.5), Entry(1, 0, 0.9)], {0: group("mine", [0.0, 1.0])})
    entries, groups = buffer.take(2, version=0)
    assert [entry.serial for entry in entries] == [1, 0]
    assert list(groups) == [0]


def test_state_survives_a_checkpoint() -> None:
    buffer = filled((0, 1, 0.5), (1, 2, 0.7), max_uses=2)
    buffer.take(1, version=2)
    copy = ReplayBuffer(buffer.settings)
    copy.load_state_dict(buffer.state_dict())
    assert copy.entries == buffer.entries
    assert copy.take(2, version=3) == buffer.take(2, version=3)


def test_what_comes_out_is_what_went_in() -> None:
    stored = group("a", [0.0, 1.0], version=7)
    buffer = ReplayBuffer(Replay())
    buffer.add([Entry(0, 7, 0.5)], {0: stored})
    stored_state = stored.state_dict()
    _, groups = buffer.take(1, version=9)
    assert groups[0].state_dict() == stored_state
    assert {c.weight_version for c in groups[0].completions} == {7}


@pytest.mark.parametrize("settings", [{"capacity": 0}, {"max_age": 0}, {"max_uses": 0}, {"hardness": -1.0}])
def test_a_buffer_that_holds_nothing_is_refused(settings: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Replay(**settings)
