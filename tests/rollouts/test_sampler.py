"""Rewards are computed while the engine draws on."""

import threading
from collections.abc import Sequence
from unittest.mock import Mock

import pytest

from grpo_lit.errors import RewardError
from grpo_lit.rewards import RewardCombination, WeightedReward
from grpo_lit.rewards.reward import Reward
from grpo_lit.rollout import Completion, Prompt, Request, Sampling
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


def test_no_prompts_cost_no_call() -> None:
    drawn = engine()
    assert (
        Sampler(drawn, RewardCombination({"n": WeightedReward(Lengths())}), seed=0).scored_groups([], Sampling()) == []
    )
    assert drawn.calls == []
