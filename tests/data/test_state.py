"""Every rank takes up its own part of a checkpoint, on any number of ranks."""

from typing import Any
from unittest.mock import Mock

import pytest

from grpo_lit.data.state import gathered, own_share, without_groups
from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Completion, Group, Prompt


def group(n: int) -> Group:
    return Group(Prompt(str(n), "q", token_ids=(n,)), 0, (Completion((n,), (-1.0,), "x", "stop", 0),), rewards=[1.0])


def rank(index: int, size: int, gather: Any = None) -> Ranks:
    return Mock(spec=Ranks, rank=index, world_size=size, gather=gather or (lambda value: [value]))


def state_of(serials: list[int], stored: list[int], rollout: dict | None = None) -> dict[str, Any]:
    return {
        "stream": {"position": 7},
        "collector": {
            "next_serial": 9,
            "waiting": {"serials": [0, 1, 2], "versions": [0, 0, 0], "groups": {n: group(n) for n in serials}},
            "replay": {"entries": [], "groups": {n: group(n) for n in stored}},
        },
        "queue": {"handed_out": 0, "rounds": []},
        "rollout": rollout,
    }


def written(rollouts: tuple[dict | None, dict | None] = (None, None)) -> dict[str, Any]:
    """The checkpoint of two ranks: the first waits with groups 0 and 2, the second with 1."""
    states = [state_of([0, 2], [4], rollouts[0]), state_of([1], [3, 5], rollouts[1])]
    mine: list[Any] = []
    for index, state in enumerate(states):
        gathered(state, rank(index, 2, lambda value: mine.append(value) or [value]))
    return gathered(states[0], rank(0, 2, lambda value: list(mine)))


def serials(state: dict[str, Any]) -> tuple[list[int], list[int]]:
    return list(state["collector"]["waiting"]["groups"]), list(state["collector"]["replay"]["groups"])


def test_as_many_ranks_take_up_what_each_had() -> None:
    state = written(({"update": "a"}, {"update": "b"}))
    first, second = (own_share(state, rank(index, 2)) for index in range(2))
    assert serials(first) == ([0, 2], [4])
    assert serials(second) == ([1], [3, 5])
    assert [first["rollout"], second["rollout"]] == [{"update": "a"}, {"update": "b"}]
    assert second["stream"] == {"position": 7}
    assert second["collector"]["waiting"]["groups"][1] == group(1)


@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_ranks_shares_the_groups_out(size: int) -> None:
    parts = [own_share(written(), rank(index, size)) for index in range(size)]
    waiting = [serial for part in parts for serial in serials(part)[0]]
    stored = [serial for part in parts for serial in serials(part)[1]]
    assert sorted(waiting) == [0, 1, 2]  # each once
    assert sorted(stored) == [3, 4, 5]
    assert all(part["rollout"] is None for part in parts)


def test_older_checkpoints_still_load() -> None:
    assert own_share({"stream": {}, "rollout": {"update": 1}}, rank(0, 1)) == {
        "stream": {},
        "rollout": {"update": 1},
        "collector": None,
        "queue": {"handed_out": 0, "rounds": []},
    }


def test_what_is_written_is_plain() -> None:
    def check(value: Any) -> None:
        assert isinstance(value, (dict, list, tuple, str, int, float, bool, type(None))), type(value)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
            check(item)

    check(written())


def test_groups_of_other_settings_are_dropped_with_a_warning() -> None:
    state = own_share(written(), rank(0, 2))["collector"]
    with pytest.warns(UserWarning, match=r"dropped.*data\.sampling.*data\.rewards"):
        empty = without_groups(state)
    assert empty["waiting"] == {"serials": [], "versions": [], "drawn": [], "groups": {}}
    assert empty["replay"] == {"entries": [], "groups": {}}
    assert empty["next_serial"] == 9
