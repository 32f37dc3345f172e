"""The data module's own promises: order of calls to the engine, seeds, ranks, and who is told of a stale engine."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from bare import RecordingEngine, bare_data, one_of
from lightning.pytorch.trainer.states import TrainerFn
from toys import Letters

from grpo_lit.data.evaluation import Evaluation
from grpo_lit.data.mixture import Mixture, MixturePart
from grpo_lit.data.module import RolloutDataModule
from grpo_lit.errors import ConfigError
from grpo_lit.metrics.evaluation import HeldOutFigures
from grpo_lit.rewards import MathEquivalence, MultipleChoice, RewardCombination, WeightedReward
from grpo_lit.rollout import Completion, Prompt, Sampling


@pytest.fixture
def build(tiny_model_path: Path) -> Callable[..., RolloutDataModule]:
    def make(rank: int = 0, world_size: int = 1, gap: float = 0.0, **changes: Any) -> RolloutDataModule:
        return bare_data(tiny_model_path, one_of(rank, world_size), **{"engine": RecordingEngine(gap), **changes})

    return make


def test_weights_are_loaded_before_each_rollout_and_once_per_version(build: Callable) -> None:
    data = build(num_updates=2)
    for step in range(4):
        data.trainer.lightning_module.global_step = step
        data.draw()
    expected = ["start", "load 0", "score", "generate 10 with 0", "load 2", "score", "generate 10 with 2"]
    assert data.engine.calls == expected


def test_evaluation_uses_the_newest_weights_and_the_next_rollout_needs_no_second_sync(build: Callable) -> None:
    data = build(val={"held": Letters(3, heldout=True)})
    data.trainer.lightning_module.global_step = 4
    (loader,) = data.val_dataloader()
    (batch,) = list(loader)
    assert len(batch.greedy) == 3
    data.draw()
    assert data.engine.calls == ["start", "load 4", "score", "generate 3 with 4", "generate 10 with 4"]


def test_no_two_samples_share_a_seed_and_ranks_split_the_same_prompts(build: Callable) -> None:
    whole, *parts = build(), build(rank=0, world_size=2), build(rank=1, world_size=2)
    for data in (whole, *parts):
        for _ in range(4):  # 20 prompts of 12: into the second epoch
            data.draw()
    seeds = [data.engine.seeds for data in (whole, *parts)]
    assert len(set(seeds[0])) == len(seeds[0]) == 40
    assert sorted(seeds[1] + seeds[2]) == sorted(seeds[0])
    assert not set(seeds[1]) & set(seeds[2])


def test_an_engine_without_the_weights_is_reported(build: Callable) -> None:
    with pytest.warns(
        UserWarning, match="engine and learner disagree after the weight sync of step 0: mean log-prob gap 0.5"
    ):
        build(gap=0.5).draw()


def test_closing_is_safe_at_any_time_and_the_engine_starts_anew(build: Callable) -> None:
    data = build()
    data.teardown("fit")
    data.draw()
    data.on_exception(RuntimeError())
    data.draw()
    starts = [call for call in data.engine.calls if call in ("start", "close")]
    assert starts == ["close", "start", "close", "start"]


@pytest.mark.parametrize("how", ["teardown", "on_exception"])
def test_the_end_of_the_run_ends_the_processes_of_the_rewards(build: Callable, how: str) -> None:
    def workers() -> set[int]:
        processes = psutil.Process().children(recursive=True)
        return {process.pid for process in processes if "worker_process.py" in " ".join(process.cmdline())}

    reward, before = MathEquivalence(workers=1), workers()
    data = build(rewards=RewardCombination({"math": WeightedReward(reward)}))
    for _ in range(2):  # a closed reward starts anew, as the engine does
        reward(Prompt("q", "", answer="x+1"), [Completion((), (), r"\boxed{1+x}", "stop", 0)])
        started = workers() - before
        assert started
        data.teardown("fit") if how == "teardown" else data.on_exception(KeyboardInterrupt())
        assert not started & workers()


def test_rewards_are_closed_though_the_engine_fails_to(build: Callable) -> None:
    data = build()
    data.engine.close = Mock(side_effect=OSError("cannot close"))
    data.rewards.close = Mock()
    with pytest.raises(OSError, match="cannot close"):
        data.teardown("fit")
    data.rewards.close.assert_called_once_with()


def test_more_ranks_than_held_out_prompts_still_end_the_loop(build: Callable) -> None:
    data = build(rank=1, world_size=2, val={"held": Letters(1, heldout=True)})
    (loader,) = data.val_dataloader()
    (batch,) = list(loader)
    assert batch.greedy == []
    assert list(batch.figures()) == []


def test_ranks_share_out_the_held_out_prompts_by_their_places(build: Callable) -> None:
    parts = [build(rank=rank, world_size=2, val={"held": Letters(5, heldout=True)}) for rank in range(2)]
    batches = [batch for data in parts for loader in data.val_dataloader() for batch in loader]
    assert [batch.places for batch in batches] == [[0, 2, 4], [1, 3]]
    assert [group.prompt.id for batch in batches for group in batch.greedy] == [f"letters/{i}" for i in (0, 2, 4, 1, 3)]


@pytest.mark.parametrize("num_updates", [1, 2])
def test_a_step_that_was_not_made_is_drawn_again_after_a_crash(build: Callable, num_updates: int) -> None:
    def asked(data: RolloutDataModule, steps: range) -> list[list[int]]:
        drawn = []
        for step in steps:
            data.trainer.lightning_module.global_step = step
            minibatch = data.draw()
            minibatch.rollout.updates = minibatch.rollout.plan.sequences(minibatch.rollout.batch)
            drawn.append(
                minibatch.rollout.batch.select(minibatch.rollout.updates[minibatch.update]).prompt_ids.tolist()
            )
        return drawn

    straight = asked(build(num_updates=num_updates), range(4))
    crashed = build(num_updates=num_updates)
    asked(crashed, range(3))  # the third is drawn, and never trained on
    resumed = build(num_updates=num_updates)
    resumed.load_state_dict(crashed.state_dict())
    assert asked(resumed, range(2, 4)) == straight[2:]


def test_evaluation_ignores_where_training_stood(build: Callable) -> None:
    trained = build()
    trained.draw()
    other = build(seed=5)
    other.trainer.state.fn = TrainerFn.TESTING
    other.load_state_dict(trained.state_dict())
    assert other.stream.state_dict()["position"] == 0


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"sampling": Sampling(max_tokens=0)}, "data.sampling.max_tokens"),
        ({"evaluation": Evaluation(prompts_per_batch=0)}, "data.evaluation.prompts_per_batch"),
        ({"evaluation": Evaluation(completions=-1)}, "data.evaluation.completions"),
        ({"num_epochs": 0}, "data.num_epochs"),
        ({"num_updates": 6}, "data.num_updates"),
        # Field bug D6: what makes all samples of a group equal is for evaluation only.
        ({"sampling": Sampling(temperature=0.0)}, "data.sampling.temperature"),
        ({"sampling": Sampling(top_k=1)}, "data.sampling.top_k"),
        ({"sampling": Sampling(min_p=1.0)}, "data.sampling.min_p"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(build: Callable, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(key)):
        build(**changes)


def mixed(*domains: str, heldout: bool = False) -> Mixture:
    return Mixture({name: MixturePart(Letters(4, heldout), domain=name) for name in domains})


def test_each_domain_of_a_mixture_has_a_solve_rate(build: Callable) -> None:
    data = build(
        train=mixed("math", "code"), val={"both": mixed("x", "y", heldout=True), "one": Letters(2, heldout=True)}
    )
    assert data.domains == ("code", "math")
    names = set(data.draw().rollout.rates._sums)
    assert {"reward/correct", "reward/correct/code", "reward/correct/math"} <= names
    assert {"reward/unreadable_prompts", "length/long_prompts", "exploration/passed_over"} <= names
    held_out = HeldOutFigures()
    for loader in data.val_dataloader():
        for batch in loader:
            for place, figures in batch.figures():
                held_out.add(batch.name, place, figures)
    values = {name: value for name, value in held_out.means().items() if "greedy" in name}
    assert set(values) == {"val/both/greedy", "val/both/greedy/x", "val/both/greedy/y", "val/one/greedy"}
    # Each domain has half of the prompts.
    assert values["val/both/greedy"] == (values["val/both/greedy/x"] + values["val/both/greedy/y"]) / 2


def test_one_domain_is_logged_once(build: Callable) -> None:
    data = build()
    assert data.domains == ("letters",)
    assert not [name for name in data.draw().rollout.rates._sums if name.startswith("reward/correct/")]


def test_a_table_that_cannot_be_judged_at_all_is_refused_at_set_up(build: Callable) -> None:
    class Yes(Letters):
        def __getitem__(self, index: int) -> Prompt:
            return replace(super().__getitem__(index), answer="yes")

    rewards = RewardCombination({"math": WeightedReward(MathEquivalence(workers=1))})
    with pytest.raises(ConfigError, match=r"'math', which can judge none of 12.*no mathematical expression"):
        build(train=Yes(), rewards=rewards)


def test_bad_options_of_one_row_are_found_at_set_up_and_end_no_run(build: Callable) -> None:
    class Options(Letters):
        def __getitem__(self, index: int) -> Prompt:
            options = None if index == 3 else ["4", "5"]
            return replace(super().__getitem__(index), answer="A", metadata={"options": options})

    with pytest.warns(UserWarning, match=r"1 of 12 prompts.*options that are neither a list.*letters/3"):
        data = build(train=Options(), rewards=RewardCombination({"letter": WeightedReward(MultipleChoice())}))
    for step in range(6):  # two passes and a half
        data.trainer.lightning_module.global_step = step
        assert all(group.prompt.id != "letters/3" for group in data.draw().rollout.groups)


def test_held_out_questions_in_the_training_data_are_refused_at_set_up(build: Callable) -> None:
    with pytest.raises(ConfigError, match=r"no question of `data.val`, but got letters/[01], .*`data.val.same`"):
        build(val={"same": Letters(2)})
