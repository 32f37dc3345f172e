"""Rollouts are filled with groups that have signal, the same on any number of ranks."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bare import RecordingEngine
from lightning.pytorch.strategies import SingleDeviceStrategy

from grpo_lit.data.checks import check_sampling
from grpo_lit.data.curriculum import Curriculum
from grpo_lit.data.options import RolloutOptions
from grpo_lit.errors import ConfigError
from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Completion, Group, Prompt, Sampling
from grpo_lit.rollouts.collector import Collected, Collector, DynamicSampling
from grpo_lit.rollouts.queue import RolloutQueue
from grpo_lit.rollouts.replay import Replay, ReplayBuffer
from grpo_lit.rollouts.sampler import Sampler

SAMPLING = Sampling(completions=2, max_tokens=4)
ALONE = Ranks(SingleDeviceStrategy(device=torch.device("cpu")))


class Scripted(Sampler):
    """Every prompt has two samples; ``signal(n)`` says of prompt n whether they differ."""

    def __init__(self, signal: Callable[[int], bool]) -> None:
        self.signal = signal
        self.asked: list[int] = []
        self.rewards = SimpleNamespace(counters=lambda: {"r_unreadable": len(self.asked)})
        self.engine = RecordingEngine()
        self.version = 0

    @property
    def version(self) -> int:
        return self.engine.weight_version

    @version.setter
    def version(self, version: int) -> None:
        self.engine.weight_version = version

    def take_seconds(self) -> dict[str, float]:
        return {}

    def scored_groups(self, prompts: Sequence[tuple[Prompt, int]], sampling: Sampling) -> list[Group]:
        self.asked += [int(prompt.id) for prompt, _ in prompts]
        return [self._group(prompt, epoch) for prompt, epoch in prompts]

    def _group(self, prompt: Prompt, epoch: int) -> Group:
        n = int(prompt.id)
        samples = tuple(Completion((n, 2), (-1.0, -1.0), "x", "stop", self.version) for _ in range(2))
        scores = [1.0, 0.0] if self.signal(n) else [0.0, 0.0]
        flags = [score == 1.0 for score in scores]
        return Group(prompt, epoch, samples, scores={"r": list(scores)}, rewards=list(scores), correct=list(flags))


class Prompts:
    """0, 1, 2, ... without end."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, count: int) -> list[tuple[Prompt, int]]:
        self.next += count
        return [(Prompt(str(n), "", token_ids=(1,)), 0) for n in range(self.next - count, self.next)]


def names(got: Collected) -> list[int]:
    return [int(group.prompt.id) for group in got.groups]


def collector(signal: Callable[[int], bool], dynamic: DynamicSampling | None, replay: Replay | None = None) -> Any:
    made = Collector(RolloutQueue(Scripted(signal)), ["r"], dynamic, None if replay is None else ReplayBuffer(replay))
    prompts = Prompts()

    def collect(wanted: int, version: int = 0) -> Collected:
        made.queue.sampler.version = version
        return made.collect(wanted, prompts.take, SAMPLING, ALONE, version)

    return made, collect


def test_without_dynamic_sampling_every_group_is_kept() -> None:
    _, collect = collector(lambda n: n % 2 == 0, None)
    got = collect(4)
    assert names(got) == [0, 1, 2, 3]
    assert got.size == 4
    assert got.rates.compute()["reward/r_unreadable"] == 0.5  # 4 counted, of 8 samples
    assert got.solved == {"0": 0.5, "1": 0.0, "2": 0.5, "3": 0.0}


def test_rounds_fill_the_rollout_and_the_surplus_waits() -> None:
    # 4 wanted, oversampled by 1.5: 6 asked, 0 2 4 have signal. One is missing: ceil(1.5) = 2 asked, 6 has it.
    # 0 2 4 6 are the rollout. Then 4 wanted: 6 asked (8 to 13): 8 10 12; 2 more (14 15): 14.
    made, collect = collector(lambda n: n % 2 == 0, DynamicSampling(max_rounds=9))
    got = collect(4)
    assert names(got) == [0, 2, 4, 6]
    assert made.queue.sampler.asked == list(range(8))
    rates = got.rates.compute()
    assert rates["exploration/rounds"] == 2
    assert rates["exploration/accepted"] == 0.5
    assert rates["exploration/zero_signal"] == 0.5  # of all that was drawn
    assert rates["reward/correct_kept"] == 0.5
    assert rates["reward/correct_dropped"] == 0.0
    # All have signal: of 6 asked 2 wait, and come first in the next rollout.
    made, collect = collector(lambda n: True, DynamicSampling())
    assert names(collect(4)) == [0, 1, 2, 3]
    got = collect(4, version=1)
    assert names(got) == [4, 5, 6, 7]
    assert [group.completions[0].weight_version for group in got.groups] == [0, 0, 1, 1]
    assert got.rates.compute()["exploration/carried"] == 2


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(("max_age", "firsts"), [(0, [0, 6, 12]), (1, [0, 2, 6]), (2, [0, 2, 4])])
def test_a_surplus_group_waits_for_max_age_rollouts_of_any_number_of_steps(
    max_age: int, firsts: list[int], steps: int
) -> None:
    # 2 wanted, 6 asked: 0 1 are the rollout, 2 to 5 wait. The next takes 2 3, the one after it 4 5, unless too old.
    _, collect = collector(lambda n: True, DynamicSampling(oversample=3.0, max_age=max_age))
    assert [names(collect(2, version=steps * rollout))[0] for rollout in range(3)] == firsts


def test_groups_that_wait_in_an_older_checkpoint_were_drawn_for_the_last_rollout() -> None:
    made, collect = collector(lambda n: True, DynamicSampling())
    collect(4)
    state = made.state_dict()
    del state["rollouts"], state["waiting"]["drawn"], state["tokens"]
    copy, collect = collector(lambda n: True, DynamicSampling())
    copy.load_state_dict(state)
    assert names(collect(2, version=8)) == [4, 5]
    copy.load_state_dict(state)
    assert copy.collect(1, Prompts().take, SAMPLING, ALONE, 8).groups[0].prompt.id == "4"
    assert names(copy.collect(1, Prompts().take, SAMPLING, ALONE, 16)) == [0]  # 5 has waited for two rollouts


def test_a_surplus_larger_than_a_rollout_needs_no_new_prompt() -> None:
    made, collect = collector(lambda n: True, DynamicSampling(oversample=3.0))
    assert names(collect(2)) == [0, 1]
    got = collect(2, version=1)
    assert names(got) == [2, 3]
    assert made.queue.sampler.asked == list(range(6))
    assert "reward/correct" in got.rates._sums  # names are there on every rank, whatever was drawn


def test_constant_rewards_end_the_search() -> None:
    """Field bug D1."""
    made, collect = collector(lambda n: False, DynamicSampling(oversample=1.0, adapt=False, max_rounds=3))
    with pytest.warns(
        UserWarning, match=r"step 0 holds 0 of 4 groups: of 12 prompts asked in 3 rounds, 12 were solved"
    ):
        got = collect(4)
    assert names(got) == []
    assert got.size == 0
    assert made.queue.sampler.asked == list(range(12))


def test_one_usable_group_in_ten_fills_what_it_can_and_says_so() -> None:
    """Field bug D1."""
    # 2 wanted. 3 are asked, of which 0 has signal, then ceil(1.5) = 2 a round: the fifth asks 9 and 10.
    made, collect = collector(lambda n: n % 10 == 0, DynamicSampling(adapt=False, max_rounds=5))
    assert names(collect(2)) == [0, 10]
    assert made.queue.sampler.asked == list(range(11))
    _, collect = collector(lambda n: n % 10 == 0, DynamicSampling(adapt=False, max_rounds=4))
    said = "holds 1 of 2 groups: of 9 prompts asked in 4 rounds, 8 were solved by no sample and 0 by all"
    with pytest.warns(UserWarning, match=said):
        assert names(collect(2)) == [0]


def test_one_group_more_than_wanted_waits() -> None:
    """Field bug D1."""
    _, collect = collector(lambda n: n < 3, DynamicSampling(oversample=1.5, max_rounds=1))
    got = collect(2)
    assert (names(got), got.rates.compute()["exploration/waiting"]) == ([0, 1], 1)
    assert names(collect(1, version=1)) == [2]


def test_active_sampling_asks_for_as_many_as_are_missing() -> None:
    made, collect = collector(lambda n: n != 1, DynamicSampling(oversample=1.0, adapt=False))
    assert names(collect(3)) == [0, 2, 3]
    assert made.queue.sampler.asked == [0, 1, 2, 3]


def test_later_rounds_ask_what_the_acceptance_so_far_calls_for() -> None:
    # 4 wanted, 6 asked, 0 and 5 have signal: a third. 2 missing call for 2 * 3 = 6 more (6 to 11), which hold 10 alone;
    # then 1 missing at 12 asked and 3 accepted calls for 4 (12 to 15), which hold 15.
    made, collect = collector(lambda n: n % 5 == 0, DynamicSampling())
    assert names(collect(4)) == [0, 5, 10, 15]
    assert made.queue.sampler.asked == list(range(16))
    settings = DynamicSampling(oversample=1.5)
    assert settings.prompts(missing=2, asked=6, accepted=6) == 3  # never less than the first round's factor
    assert settings.prompts(missing=2, asked=600, accepted=0) == 12  # nor more than four times that
    assert settings.prompts(missing=2, asked=0, accepted=0) == 3


def test_replay_stands_in_for_groups_without_signal() -> None:
    # First 0 1 2 3: 1 and 3 have none, nothing is stored yet. 0 and 2 are stored after. Then 4 5 6 7, none has signal:
    # 2 and 0 (newest first) take the places of 4 and 5, and are used up.
    _, collect = collector(lambda n: n in (0, 2), None, Replay())
    assert names(collect(4)) == [0, 1, 2, 3]
    got = collect(4, version=1)
    assert names(got) == [2, 0, 6, 7]
    assert got.rates.compute()["system/replay_share"] == 0.5
    assert [group.completions[0].weight_version for group in got.groups] == [0, 0, 1, 1]
    assert names(collect(4, version=2)) == [8, 9, 10, 11]


def test_replay_fills_what_dynamic_sampling_could_not() -> None:
    _, collect = collector(lambda n: n < 3, DynamicSampling(oversample=1.0, max_rounds=1), Replay(max_uses=2))
    assert names(collect(3)) == [0, 1, 2]
    assert names(collect(2, version=1)) == [2, 1]
    assert collect(2, version=1).size == 2


def test_two_ranks_decide_as_one_does() -> None:
    def signal(n: int) -> bool:
        return n % 3 != 0

    settings = DynamicSampling(oversample=1.5), Replay(hardness=0.0)
    _, alone = collector(signal, *settings)
    expected = [names(alone(5, version)) for version in range(3)]

    # Both ranks run in lockstep: each sum is over what either would have put in.
    made = [Collector(RolloutQueue(Scripted(signal)), ["r"], settings[0], ReplayBuffer(settings[1])) for _ in range(2)]
    prompts = [Prompts(), Prompts()]
    for version in range(3):
        parts = run_in_lockstep(made, prompts, version)
        placed = sorted((place, n) for part in parts for place, n in zip(part.places, names(part), strict=True))
        assert [n for _, n in placed] == expected[version]
        assert {part.size for part in parts} == {len(expected[version])}


def run_in_lockstep(made: list[Collector], prompts: list[Prompts], version: int) -> list[Collected]:
    import threading

    barrier, given, results = threading.Barrier(2), [None, None], [None, None]

    class Both(Ranks):
        def __init__(self, index: int) -> None:
            self.index = index

        world_size = property(lambda self: 2)
        rank = property(lambda self: self.index)

        def sum(self, values: torch.Tensor) -> torch.Tensor:
            given[self.index] = values
            barrier.wait(10)
            total = given[0] + given[1]
            barrier.wait(10)
            return total

    def work(index: int) -> None:
        made[index].queue.sampler.version = version
        results[index] = made[index].collect(5, prompts[index].take, SAMPLING, Both(index), version)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_state_holds_what_the_next_rollout_depends_on() -> None:
    settings = DynamicSampling(oversample=2.0), Replay()
    made, collect = collector(lambda n: n % 4 != 0, *settings)
    collect(3)
    other, other_collect = collector(lambda n: n % 4 != 0, *settings)
    other_collect(3)
    copy = Collector(RolloutQueue(Scripted(made.queue.sampler.signal)), ["r"], settings[0], ReplayBuffer(settings[1]))
    copy.load_state_dict(made.state_dict())
    prompts = Prompts()
    prompts.take(6)
    copy.queue.sampler.version = 1
    got, expected = copy.collect(5, prompts.take, SAMPLING, ALONE, 1), other_collect(5, version=1)
    assert [g.state_dict() for g in got.groups] == [g.state_dict() for g in expected.groups]
    assert copy.state_dict() == other.state_dict()


def test_what_is_logged_beside_a_probe_is_of_its_samples_alone() -> None:
    """Prompt n is right where n is odd, at every second sample; the even ones are always wrong and have two samples."""

    class Probed(Scripted):
        def _group(self, prompt: Prompt, epoch: int) -> Group:
            size = 8 if self.signal(int(prompt.id)) else 2
            samples = tuple(Completion((5, 2), (-1.0, -1.0), "x", "stop", self.version) for _ in range(size))
            flags = [size == 8 and i % 2 == 0 for i in range(size)]
            scores = [float(flag) for flag in flags]
            return Group(prompt, epoch, samples, {"r": list(scores)}, list(scores), flags)

    dynamic = DynamicSampling(oversample=1.0, probe=2)
    made = Collector(RolloutQueue(Probed(lambda n: n % 2 == 1)), ["r"], dynamic)
    got = made.collect(2, Prompts().take, SAMPLING, ALONE, 0)
    assert [len(group.completions) for group in got.groups] == [8, 8]
    values = got.rates.compute()
    # Of every two prompts one is right half the time: 1/4, where all samples together would say (4 + 0) / (8 + 2).
    assert values["reward/correct"] == values["reward/r"] == 0.25
    assert values["exploration/zero_signal"] == values["exploration/solve_none"] == 0.5
    assert got.tokens == 2 * 2 * (8 + 2)  # what was drawn, all of it
    assert values["exploration/accepted"] == 16 / 20  # of the samples drawn, those of kept groups
    assert values["reward/correct_kept"] == 0.5
    assert values["length/kept"] == values["length/dropped"] == 2.0


@pytest.mark.parametrize(
    "settings",
    [
        {"oversample": 0.5},
        {"oversample": float("inf")},
        {"oversample": 1e308},
        {"max_rounds": 0},
        {"max_age": -1},
        {"probe": 1},
    ],
)
def test_settings_that_never_fill_a_rollout_are_refused(settings: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        DynamicSampling(**settings)


def test_a_probe_is_refused_beside_what_it_would_mislead() -> None:
    with pytest.raises(ConfigError, match="probe` and `signal: reward` contradict"):
        DynamicSampling(probe=2, signal="reward")
    with pytest.raises(ConfigError, match=r"curriculum` and `data.rollout.dynamic_sampling.probe` contradict"):
        RolloutOptions(DynamicSampling(probe=2), curriculum=Curriculum())
    with pytest.raises(ConfigError, match=r"probe` expected fewer samples than `data.sampling.completions` \(4\)"):
        check_sampling(Sampling(completions=4), RolloutOptions(DynamicSampling(probe=4)))
