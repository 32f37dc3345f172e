"""The hooks of a run: in order, with the right groups, in training only; what they shape is what is trained on."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from toys import Letters

from grpo_lit.callback import RolloutCallback
from grpo_lit.data.options import RolloutOptions
from grpo_lit.module import GRPOModule
from grpo_lit.rollout import Group
from grpo_lit.rollouts.collector import DynamicSampling
from grpo_lit.rollouts.minibatch import Minibatch


class Seen(RolloutCallback):
    """Notes every hook with what it was given."""

    def __init__(self) -> None:
        self.hooks: list[tuple[str, int]] = []
        self.scored: list[list[Group]] = []
        self.kept: list[list[Group]] = []
        self.values: list[dict[str, float]] = []
        self.minibatches: list[Minibatch] = []

    def on_groups_scored(self, trainer: Trainer, module: GRPOModule, groups: Sequence[Group]) -> None:
        self.hooks.append(("scored", trainer.global_step))
        self.scored.append(list(groups))

    def on_groups_kept(self, trainer: Trainer, module: GRPOModule, groups: Sequence[Group]) -> None:
        self.hooks.append(("kept", trainer.global_step))
        self.kept.append(list(groups))

    def on_step_finished(
        self, trainer: Trainer, module: GRPOModule, minibatch: Minibatch, values: dict[str, float]
    ) -> None:
        self.hooks.append(("finished", trainer.global_step))
        self.minibatches.append(minibatch)
        self.values.append(values)


class Shapes(RolloutCallback):
    """Puts rewards in the place of what was scored, and leaves out the last sample of every group."""

    def __init__(self, rewards: list[float | None], masked: list[bool] | None = None) -> None:
        self.rewards, self.masked = rewards, masked or []

    def on_groups_scored(self, trainer: Trainer, module: GRPOModule, groups: Sequence[Group]) -> None:
        for group in groups:
            group.rewards, group.masked = list(self.rewards), list(self.masked)


def test_hooks_come_in_order_with_the_groups_of_the_rollout(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    seen = Seen()
    data = make_data(num_updates=2, val={"letters": Letters(3, heldout=True)})
    make_trainer(max_steps=4, callbacks=[seen]).fit(make_module(), datamodule=data)
    rollout = ["scored", "kept", "finished", "finished"]
    assert [name for name, _ in seen.hooks] == rollout * 2  # held-out prompts were scored at steps 0, 2, 4
    assert [step for name, step in seen.hooks if name == "scored"] == [0, 2]
    assert [step for name, step in seen.hooks if name == "finished"] == [1, 2, 3, 4]
    for scored, kept in zip(seen.scored, seen.kept, strict=True):
        assert [id(group) for group in scored] == [id(group) for group in kept]
        assert len(kept) == 4
    assert [list(m.rollout.groups) for m in seen.minibatches[::2]] == seen.kept
    assert [m.update for m in seen.minibatches] == [0, 1, 0, 1]
    assert all(values["optimization/grad_norm"] > 0 for values in seen.values)
    assert ["reward/total" in values for values in seen.values] == [True, False, True, False]


def test_shaping_comes_before_dynamic_sampling_which_looks_at_correctness(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    seen = Seen()
    data = make_data(rollout=RolloutOptions(DynamicSampling(max_rounds=20)), train=Letters(26))
    trainer = make_trainer(max_steps=2, callbacks=[Shapes([3.0, 1.0, 2.0]), seen])
    trainer.fit(make_module(), datamodule=data)
    for groups in seen.scored + seen.kept:
        assert all(group.rewards == [3.0, 1.0, 2.0] for group in groups)
    scored = [group for groups in seen.scored for group in groups]
    alike = [group for group in scored if len(set(group.correct)) == 1]
    assert alike  # have signal in their shaped rewards, and none in correctness
    assert not {id(g) for g in alike} & {id(g) for groups in seen.kept for g in groups}
    assert all(values["reward/total"] == pytest.approx(2.0) for values in seen.values)
    assert 0 < seen.values[0]["reward/correct"] < 1  # all three shaped rewards are above correct_at


def test_dropped_and_masked_samples(make_module: Callable, make_data: Callable, make_trainer: Callable) -> None:
    batches: dict[str, Any] = {}
    shapes = {
        "dropped": Shapes([1.0, 0.0, None]),
        "masked": Shapes([1.0, 0.0, 5.0], [False, False, True]),
        "all": Shapes([1.0, 0.0, 5.0]),
    }
    for name, shape in shapes.items():
        seen = Seen()
        make_trainer(max_steps=1, callbacks=[shape, seen]).fit(make_module(), datamodule=make_data())
        batches[name] = seen.minibatches[0].rollout.batch
    assert len(batches["all"].lengths) == 12
    for name in ("dropped", "masked"):
        assert batches[name].sample.tolist() == [0, 1, 3, 4, 6, 7, 9, 10]
    # A masked sample stays in the baseline of its group; a dropped one was never there.
    kept = batches["all"].advantages.reshape(4, 3)[:, :2].flatten()
    torch.testing.assert_close(batches["masked"].advantages, kept)
    assert (batches["masked"].advantages < 0).all()  # below the mean of 1, 0 and 5
    assert (batches["dropped"].advantages[::2] > 0).all()
