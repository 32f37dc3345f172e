"""Rewards are computed while the engine draws on."""

import threading
import time
from collections.abc import Sequence
from unittest.mock import Mock

import pytest

from grpo_lit.errors import EngineError, RewardError
from grpo_lit.rewards import RewardCombination, WeightedReward
from grpo_lit.rewards.reward import Reward
from grpo_lit.rollout import Completion, Prompt, Request, Sampling
from grpo_lit.rollouts.dynamic import DynamicSampling
from grpo_lit.rollouts.engine import Engine
from grpo_lit.rollouts.sampler import Sampler

PROMPTS = [(Prompt(str(n), "", token_ids=(n,)), 0) for n in range(5)]


class Lengths(Reward):
    """The first prompt token, from whatever thread."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        self.threads.add(threading.current_thread().name)
        return [float(prompt.token_ids[0])] * len(completions)


def engine(drawing: threading.Event | None = None, scored: threading.Event | None = None) -> Engine:
    calls: list[int] = []

    def generate(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        calls.append(len(requests))
        if len(calls) == 2 and drawing is not None and scored is not None:
            drawing.set()
            assert scored.wait(10), "the first part was not scored while the second was drawn"
        return [Completion((r.prompt_ids[0], 2), (-1.0, -1.0), "x", "stop", 0) for r in requests]

    made = Mock(spec=Engine)
    made.generate = generate
    made.calls = calls
    return made


@pytest.mark.parametrize(("parts", "calls"), [(1, [10]), (2, [6, 4]), (5, [2] * 5), (9, [2] * 5)])
def test_any_number_of_parts_gives_the_same_groups(parts: int, calls: list[int]) -> None:
    drawn = engine()
    sampler = Sampler(drawn, RewardCombination({"n": WeightedReward(Lengths())}), seed=0, parts=parts)
    groups = sampler.scored_groups(PROMPTS, Sampling(completions=2))
    assert [group.prompt.id for group in groups] == ["0", "1", "2", "3", "4"]
    assert [group.rewards for group in groups] == [[float(n)] * 2 for n in range(5)]
    assert drawn.calls == calls
    seconds = sampler.take_seconds()
    assert set(seconds) == {"rollout", "reward", "reward_wait", "reward_n"}
    assert 0 < seconds["reward_n"] <= seconds["reward"]
    assert set(sampler.take_seconds().values()) == {0.0}


def test_the_first_part_is_scored_while_the_second_is_drawn() -> None:
    drawing, scored = threading.Event(), threading.Event()

    class AfterDrawing(Reward):
        """Ends only once the second part is being drawn, which in turn waits for this."""

        def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
            assert drawing.wait(10)
            scored.set()
            return [0.0] * len(completions)

    sampler = Sampler(engine(drawing, scored), RewardCombination({"n": WeightedReward(AfterDrawing())}), 0, parts=2)
    assert len(sampler.scored_groups(PROMPTS, Sampling(completions=2))) == 5


def test_a_failing_reward_ends_the_rollout_with_its_own_error() -> None:
    class Fails(Reward):
        """Divides by zero."""

        def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
            return [1 / 0 for _ in completions]

    sampler = Sampler(engine(), RewardCombination({"n": WeightedReward(Fails())}), seed=0, parts=2)
    with pytest.raises(RewardError, match=r"'n' .*ZeroDivisionError"):
        sampler.scored_groups(PROMPTS, Sampling(completions=2))


class Waits(Reward):
    """Counts its calls; the first one ends, badly if asked to, only when it is told to."""

    def __init__(self, fails: bool = False) -> None:
        self.calls, self.fails = 0, fails
        self.started, self.go_on = threading.Event(), threading.Event()

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        self.calls += 1
        self.started.set()
        assert self.go_on.wait(10)
        if self.fails:
            raise ValueError("cannot score")
        return [0.0] * len(completions)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), EngineError("the engine died")])
@pytest.mark.parametrize("parts", [2, 5])  # 3 groups of the first part, or one of each of two, still wait
def test_what_ends_the_drawing_waits_for_no_more_than_the_group_being_scored(error: BaseException, parts: int) -> None:
    reward, drawn = Waits(), engine()
    draw = drawn.generate

    def fails_last(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        if len(drawn.calls) < min(parts - 1, 3):
            return draw(requests, sampling)
        assert reward.started.wait(10)
        threading.Timer(0.1, reward.go_on.set).start()  # after the error has begun to end the rollout
        raise error

    drawn.generate = fails_last
    sampler = Sampler(drawn, RewardCombination({"n": WeightedReward(reward)}), seed=0, parts=parts)
    with pytest.raises(type(error)):
        sampler.scored_groups(PROMPTS, Sampling(completions=2))
    assert reward.go_on.is_set(), "the group being scored was not waited for"
    assert reward.calls == 1


def test_a_reward_that_failed_ends_the_rollout_before_the_next_part_is_scored_or_drawn() -> None:
    reward, drawn = Waits(fails=True), engine()
    draw = drawn.generate

    def slow(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        if len(drawn.calls) == 1:
            assert reward.started.wait(10)
            reward.go_on.set()
        if drawn.calls:
            time.sleep(0.1)  # long enough for the failure to arrive
        return draw(requests, sampling)

    drawn.generate = slow
    sampler = Sampler(drawn, RewardCombination({"n": WeightedReward(reward)}), seed=0, parts=5)
    with pytest.raises(RewardError, match=r"'n' .*cannot score"):
        sampler.scored_groups(PROMPTS, Sampling(completions=2))
    assert len(drawn.calls) == 2
    assert reward.calls == 1


def test_another_thread_ends_it_once_the_group_being_scored_is_done() -> None:
    reward = Waits()
    sampler = Sampler(engine(), RewardCombination({"n": WeightedReward(reward)}), seed=0)

    def end() -> None:
        assert reward.started.wait(10)
        sampler.ended.set()
        reward.go_on.set()

    ender = threading.Thread(target=end)
    ender.start()
    with pytest.raises(EngineError, match="ended before it was done"):
        sampler.scored_groups(PROMPTS, Sampling(completions=2))
    ender.join(10)
    assert reward.calls == 1
    sampler.ended.clear()
    assert len(sampler.scored_groups(PROMPTS, Sampling(completions=2))) == 5


def test_a_sampler_works_after_an_error() -> None:
    drawn = engine()
    sampler = Sampler(drawn, RewardCombination({"n": WeightedReward(Lengths())}), seed=0, parts=2)
    draw, drawn.generate = drawn.generate, Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        sampler.scored_groups(PROMPTS, Sampling(completions=2))
    drawn.generate = draw
    groups = sampler.scored_groups(PROMPTS, Sampling(completions=2))
    assert [group.rewards for group in groups] == [[float(n)] * 2 for n in range(5)]


def test_no_prompts_cost_no_call() -> None:
    drawn = engine()
    assert (
        Sampler(drawn, RewardCombination({"n": WeightedReward(Lengths())}), seed=0).scored_groups([], Sampling()) == []
    )
    assert drawn.calls == []


class FirstSampleOdd(Reward):
    """Right where the prompt's number says so: 0 never, 1 always, 2 the first sample alone, 3 the last alone."""

    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float | None]:
        right = {"1": lambda i: True, "2": lambda i: i == 0, "3": lambda i: i == 4}.get(prompt.id, lambda i: False)
        return [float(right(i)) for i in range(len(completions))]


def test_a_probe_spares_what_shows_no_signal_and_changes_nothing_else() -> None:
    rewards = RewardCombination({"n": WeightedReward(FirstSampleOdd())})
    whole = Sampler(engine(), rewards, seed=0).scored_groups(PROMPTS[:4], Sampling(completions=5))
    probed = engine()
    sampler = Sampler(probed, rewards, seed=0, dynamic=DynamicSampling(probe=2))
    groups = sampler.scored_groups(PROMPTS[:4], Sampling(completions=5))
    assert probed.calls == [4 * 2, 3]  # two samples of each, three more of the one that differs
    assert [len(group.completions) for group in groups] == [2, 2, 5, 2]
    assert groups[2] == whole[2]
    assert [group.first(2) for group in groups] == [group.first(2) for group in whole]
    assert groups[3].correct == [False, False]  # its signal would have come with the last sample
    # Evaluation draws every sample.
    assert [len(g.completions) for g in sampler.whole_groups(PROMPTS[:4], Sampling(completions=5))] == [5] * 4


def test_without_any_signal_in_the_probe_nothing_more_is_asked() -> None:
    probed = engine()
    sampler = Sampler(
        probed, RewardCombination({"n": WeightedReward(FirstSampleOdd())}), 0, 1, DynamicSampling(probe=2)
    )
    groups = sampler.scored_groups(PROMPTS[:2], Sampling(completions=5))
    assert [len(group.completions) for group in groups] == [2, 2]
    assert sum(probed.calls) == 4
