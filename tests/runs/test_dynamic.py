"""Dynamic sampling, replay and the curriculum through the real training path."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from toys import Constant, EvenShare, Letters, SomePrompts

from grpo_lit.callback import RolloutCallback
from grpo_lit.data.curriculum import Curriculum
from grpo_lit.data.options import RolloutOptions
from grpo_lit.errors import TrainingError
from grpo_lit.objectives import Objective
from grpo_lit.rewards import RewardCombination, WeightedReward
from grpo_lit.rewards.reward import Reward
from grpo_lit.rollout import Completion, Group, Prompt
from grpo_lit.rollouts.collector import DynamicSampling
from grpo_lit.rollouts.replay import Replay


class Steps(Callback):
    """Keeps the batch of every optimizer step, and some of its figures."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.figures: list[dict[str, float]] = []
        self.groups: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch.rollout.batch)
        self.groups.append(batch.rollout.groups)
        self.figures.append({name: float(value) for name, value in trainer.callback_metrics.items()})


class FirstStepsOnly(Reward):
    """EvenShare on what the first weights sampled, 0 after: from then on no new group has signal."""

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        old = completions[0].weight_version == 0
        return EvenShare()(prompt, completions) if old else [0.0] * len(completions)


def rewards_of(reward: Reward) -> RewardCombination:
    return RewardCombination({"r": WeightedReward(reward)}, correct_at=0.5)


def test_every_step_carries_the_full_count_of_groups_with_signal(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    steps = Steps()
    data = make_data(rollout=RolloutOptions(DynamicSampling(max_rounds=20)), train=Letters(26))
    make_trainer(max_steps=3, callbacks=[steps]).fit(make_module(), datamodule=data)
    for groups, figures in zip(steps.groups, steps.figures, strict=True):
        assert len(groups) == 4
        assert all(len(set(group.correct)) == 2 for group in groups)
        assert 0 < figures["exploration/accepted"] <= 1
    assert any(figures["exploration/accepted"] < 1 for figures in steps.figures)  # or nothing was filtered


# Field bug D1.
def test_a_constant_reward_ends_in_a_message(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    data = make_data(rollout=RolloutOptions(DynamicSampling(max_rounds=2)), rewards=rewards_of(Constant()))
    with pytest.raises(TrainingError, match=r"2 minibatches in a row .* no group has signal.*solve_none 1"):
        make_trainer().fit(make_module(max_idle_minibatches=2), datamodule=data)


# Field bug D3.
@pytest.mark.parametrize("old_policy", ["logprobs", "weights", "sampler"])
@pytest.mark.parametrize("num_updates", [1, 2])
def test_replayed_rows_equal_the_stored_groups_and_compare_with_their_own_sampler(
    make_module: Callable, make_data: Callable, make_trainer: Callable, old_policy: str, num_updates: int
) -> None:
    steps = Steps()
    data = make_data(
        rollout=RolloutOptions(replay=Replay(max_uses=1)),
        rewards=rewards_of(FirstStepsOnly()),
        train=Letters(26),
        num_updates=num_updates,
    )
    trainer = make_trainer(max_steps=2 * num_updates, callbacks=[steps], num_sanity_val_steps=0)
    trainer.fit(make_module(old_policy=old_policy), datamodule=data)
    first, second = steps.batches[0], steps.batches[num_updates]
    stored = {tuple(first.select((first.group == g).nonzero()[:, 0]).prompt_ids.tolist()): g for g in range(4)}
    moved = [g for g in range(4) if len(set(first.rewards[first.group == g].tolist())) > 1]
    assert moved  # or nothing was stored
    replayed = {}
    for g in range(len(second.prompt_lengths)):
        rows = (second.group == g).nonzero()[:, 0]
        group = second.select(rows)
        if not bool(group.stale.any()):
            continue
        assert bool(group.stale.all())
        source = first.select((first.group == stored[tuple(group.prompt_ids.tolist())]).nonzero()[:, 0])
        for name in ("token_ids", "lengths", "rewards", "sampler_logprobs", "weight_version", "scores"):
            torch.testing.assert_close(getattr(group, name), getattr(source, name), rtol=0, atol=0)
        replayed[g] = group
    assert len(replayed) == len(moved)
    figures = steps.figures[num_updates]
    assert figures["system/replay_share"] == len(moved) / 4
    assert figures["optimization/kl_old"] > 1e-8  # the weights have moved since: the ratio is not 1
    assert figures["system/staleness_max"] == num_updates


class Vandal(RolloutCallback):
    """Overwrites what it is shown, after it was stored."""

    def on_groups_kept(self, trainer: Trainer, module: Any, groups: Sequence[Group]) -> None:
        for group in groups:
            group.rewards[:] = [9.0 + i for i in range(len(group.rewards))]
            group.correct[:] = [None] * len(group.correct)
            for scores in group.scores.values():
                scores[:] = [9.0] * len(scores)


# Field bug D3.
def test_stored_groups_are_not_held_by_reference(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    data = make_data(rollout=RolloutOptions(replay=Replay()), rewards=rewards_of(EvenShare()))
    make_trainer(max_steps=1, callbacks=[Vandal()], num_sanity_val_steps=0).fit(make_module(), datamodule=data)
    buffer = data.collector.replay
    assert buffer._groups
    for group in buffer._groups.values():
        (scores,) = group.scores.values()
        assert group.rewards == scores == EvenShare()(group.prompt, group.completions)
        assert None not in group.correct
    _, taken = buffer.take(1, version=1)
    for serial, group in taken.items():
        group.rewards.clear()
        assert serial not in buffer._groups or buffer._groups[serial].rewards


class Scripted(Reward):
    """``score(version, n)`` for the first sample of prompt n as those weights drew it, and 0 for the others."""

    def __init__(self, score: Callable[[int, int], float]) -> None:
        self.score = score

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        first = self.score(completions[0].weight_version, int(prompt.id.rsplit("/", 1)[1]))
        return [first] + [0.0] * (len(completions) - 1)


@pytest.fixture
def replaying(make_module: Callable, make_data: Callable, make_trainer: Callable) -> Callable[..., Steps]:
    """``replaying(settings, score, steps)``: a run that asks the same four prompts at every step."""

    def run(settings: Replay, score: Callable[[int, int], float], steps: int) -> Steps:
        recorded = Steps()
        data = make_data(rollout=RolloutOptions(replay=settings), rewards=rewards_of(Scripted(score)), train=Letters(4))
        make_trainer(max_steps=steps, callbacks=[recorded], num_sanity_val_steps=0).fit(make_module(), datamodule=data)
        return recorded

    return run


def stale(steps: Steps, step: int) -> list[Any]:
    """Return the groups of a step that older weights sampled, in the order in which they stand in the rollout."""
    return [group for group in steps.groups[step] if group.completions[0].weight_version < step]


# Field bug D3.
def test_a_full_buffer_keeps_the_group_of_highest_priority(replaying: Callable) -> None:
    # The spread of rewards grows with the prompt's number; later only prompt 0 has signal, and three places are free.
    steps = replaying(Replay(capacity=1), lambda version, n: n + 1.0 if version == 0 else 0.01 * (n == 0), 2)
    assert steps.figures[0]["system/replay_size"] == 1
    (group,) = stale(steps, 1)
    assert group.prompt.id == "letters/3"
    (stored,) = (g for g in steps.groups[0] if g.prompt.id == "letters/3")
    assert group.state_dict() == stored.state_dict()
    assert len({len(c.token_ids) for g in steps.groups[0] for c in g.completions}) > 1  # of different lengths
    # Its rows in the batch are those that it had when it was new, whatever stands beside it.
    first, second = steps.batches
    place, source = (groups.index(g) for groups, g in ((steps.groups[1], group), (steps.groups[0], stored)))
    ours, theirs = (batch.select((batch.group == n).nonzero()[:, 0]) for batch, n in ((second, place), (first, source)))
    for name in ("prompt_ids", "token_ids", "lengths", "rewards", "sampler_logprobs", "weight_version"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=0, atol=0)
    torch.testing.assert_close(ours.advantages, theirs.advantages)
    assert steps.figures[1]["system/replay_share"] == 1 / 4


def test_of_equal_priorities_the_newest_stay_and_come_first(replaying: Callable) -> None:
    steps = replaying(Replay(capacity=2), lambda version, n: 1.0 if version == 0 else 0.01 * (n == 0), 2)
    asked = [group.prompt.id for group in steps.groups[0]]
    assert [group.prompt.id for group in stale(steps, 1)] == [asked[3], asked[2]]
    assert steps.figures[1]["system/replay_share"] == 2 / 4


@pytest.mark.parametrize(("max_age", "version"), [(1, 1), (2, 0)])
def test_groups_of_weights_that_are_too_old_never_come_back(replaying: Callable, max_age: int, version: int) -> None:
    def score(weights: int, n: int) -> float:
        # Large spreads first, then small ones in every group (nothing is replayed), then prompt 0 alone has signal.
        return (n + 1.0, 0.01 * (n + 1), 0.01 * (n == 0))[min(weights, 2)]

    steps = replaying(Replay(max_age=max_age), score, 3)
    assert stale(steps, 1) == []
    back = stale(steps, 2)
    assert [group.completions[0].weight_version for group in back] == [version] * 3
    assert [group.prompt.id for group in back] == ["letters/3", "letters/2", "letters/1"]
    assert steps.figures[2]["system/staleness_max"] == 2 - version


def test_prompts_without_signal_are_passed_over(
    make_module: Callable, make_data: Callable, make_trainer: Callable
) -> None:
    class Odd(Reward):
        """Only prompts with an odd number can be solved by some."""

        def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
            odd = int(prompt.id.rsplit("/", 1)[1]) % 2
            return EvenShare()(prompt, completions) if odd else [0.0] * len(completions)

    steps = Steps()
    data = make_data(rollout=RolloutOptions(curriculum=Curriculum(revisit=0.01)), rewards=rewards_of(Odd()))
    make_trainer(max_steps=6, callbacks=[steps], num_sanity_val_steps=0).fit(make_module(), datamodule=data)
    # 12 prompts, 4 a step: three steps see all of them, from then on few of the even ones come.
    later = [int(group.prompt.id.rsplit("/", 1)[1]) for groups in steps.groups[3:] for group in groups]
    assert sum(n % 2 for n in later) >= 10
    assert any(figures["exploration/passed_over"] > 0 for figures in steps.figures[3:])


# Field bug F3: groups in waiting and in the buffer too. Field bug F4: all of it loads with weights_only.
@pytest.mark.parametrize("probe", [None, 2])
def test_a_resumed_run_equals_one_never_stopped_with_everything_on(
    make_module: Callable, make_data: Callable, make_trainer: Callable, weights_of: Callable, tmp_path: Path,
    probe: int | None,
) -> None:  # fmt: skip
    def build(max_steps: int, *callbacks: Callback) -> tuple[Any, Any, Trainer, Steps]:
        steps = Steps()
        gentle = lambda parameters: torch.optim.Adam(parameters, lr=1e-3)  # noqa: E731
        data = make_data(
            rollout=RolloutOptions(
                DynamicSampling(oversample=2.0, max_rounds=1, max_age=2, probe=probe),
                Replay(max_uses=2),
                None if probe else Curriculum(revisit=0.3),
            ),
            num_updates=2,
            train=Letters(12),
            rewards=rewards_of(SomePrompts()),
        )
        trainer = make_trainer(max_steps=max_steps, callbacks=[steps, *callbacks], num_sanity_val_steps=0)
        return make_module(optimizer=gentle, objective=Objective()), data, trainer, steps

    straight, data, trainer, all_steps = build(8)
    trainer.fit(straight, datamodule=data)
    for stop in (3, 4):  # in the middle of a rollout, and between two
        saver = ModelCheckpoint(tmp_path / str(stop), filename="x", every_n_train_steps=stop)
        module, data, trainer, _ = build(stop, saver)
        trainer.fit(module, datamodule=data)
        resumed, data, trainer, rest = build(8)
        trainer.fit(resumed, datamodule=data, ckpt_path=str(tmp_path / str(stop) / "x.ckpt"))
        torch.testing.assert_close(weights_of(resumed), weights_of(straight), rtol=0, atol=0)
        ours, theirs = (part.trainer.optimizers[0].state_dict()["state"] for part in (resumed, straight))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        asked = [[[g.prompt.id for g in groups] for groups in steps.groups] for steps in (rest, all_steps)]
        assert asked[0][1:] == asked[1][stop + 1 :]  # of a rollout in progress, the groups are not restored
        assert stop == 3 or asked[0][0] == asked[1][stop]
        assert stop == 3 or rest.figures[0].keys() == all_steps.figures[stop].keys()
        for one, other in zip(all_steps.figures[stop:], rest.figures, strict=True):
            # A rollout in progress logs nothing of how it was drawn a second time.
            same = {name for name in other if not name.startswith(("system/time", "system/memory", "val/"))}
            there, here = ({n: part[n] for n in same if "tokens_per_s" not in n} for part in (one, other))
            assert here == pytest.approx(there, rel=0, abs=0, nan_ok=True)
    assert any(figures.get("system/replay_share", 0) > 0 for figures in all_steps.figures)
    assert probe or any(figures.get("exploration/carried", 0) > 0 for figures in all_steps.figures)
