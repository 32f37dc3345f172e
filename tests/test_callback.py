"""Hooks come in the order of the callbacks, and nobody touches what is not theirs."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
from lightning.pytorch import Callback, Trainer

from grpo_lit.callback import RolloutCallback, RolloutHooks
from grpo_lit.errors import TrainingError
from grpo_lit.module import GRPOModule
from grpo_lit.rollout import Completion, Group, Prompt


class Does(RolloutCallback):
    """Calls a function on every group that was scored."""

    def __init__(self, change: Callable[[Group], Any]) -> None:
        self.change = change

    def on_groups_scored(self, trainer: Trainer, module: GRPOModule, groups: Sequence[Group]) -> None:
        for group in groups:
            self.change(group)


def group() -> Group:
    completions = tuple(Completion((i,), (-1.0,), "x", "stop", 0) for i in range(2))
    return Group(Prompt("p/1", "?"), 0, completions, {"r": [1.0, 0.0]}, [1.0, 0.0], [True, False])


def hooks(*callbacks: Callback) -> RolloutHooks:
    return RolloutHooks(Mock(spec=Trainer, callbacks=list(callbacks), lightning_module=Mock(spec=GRPOModule)))


def test_each_sees_what_the_one_before_it_did():
    def double(g: Group) -> None:
        g.rewards = [None if r is None else 2 * r for r in g.rewards]

    def less(g: Group) -> None:
        g.rewards = [g.rewards[0] - 1, None]

    for order, expected in ((double, less), [1.0, None]), ((less, double), [0.0, None]):
        it = group()
        hooks(Does(order[0]), Callback(), Does(order[1])).groups_scored([it])
        assert it.rewards == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g.correct.__setitem__(1, True), r"Does\.on_groups_scored.*`group\.correct`.*p/1"),
        (lambda g: g.rewards.append(0.0), r"2 rewards.*left 3"),
        (lambda g: g.masked.append(True), r"`masked` flags.*and 1 for p/1"),
        (lambda g: g.rewards.__setitem__(0, float("nan")), r"finite rewards or None, but left nan"),
    ],
    ids=["correct", "rewards", "masked", "nan"],
)
def test_what_is_not_theirs_is_refused_with_their_name(change: Callable, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        hooks(Does(change)).groups_scored([group()])


def test_without_a_trainer_nobody_is_called():
    untouched, shown = group(), group()
    RolloutHooks().groups_scored([shown])
    RolloutHooks().groups_kept([shown])
    assert shown == untouched
