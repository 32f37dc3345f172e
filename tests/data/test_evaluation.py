"""What is asked of the engine for held-out prompts, and which settings of it are refused."""

from collections.abc import Sequence
from unittest.mock import Mock

import pytest

from grpo_lit.data.evaluation import Evaluation, answered
from grpo_lit.errors import ConfigError
from grpo_lit.rewards import NumericMatch, RewardCombination, WeightedReward
from grpo_lit.rollout import Completion, Prompt, Request, Sampling
from grpo_lit.rollouts.engine import Engine
from grpo_lit.rollouts.sampler import Sampler

PROMPTS = [(3, Prompt("a", "1 + 1", "2", token_ids=(1,))), (5, Prompt("b", "2 + 2", "4", token_ids=(2,)))]


def sampler_of(texts: Sequence[str]) -> tuple[Sampler, list[Sampling]]:
    """A sampler whose engine says these texts, one after the other, and the samplings it was asked for."""
    said, asked = iter(texts), []

    def generate(requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        asked.append(sampling)
        return [Completion((4,), (0.0,), next(said), "stop", 0) for _ in requests]

    rewards = RewardCombination({"answer": WeightedReward(NumericMatch())})
    return Sampler(Mock(spec=Engine, generate=generate), rewards, seed=0), asked


def test_every_prompt_is_asked_greedily_and_k_times() -> None:
    sampler, asked = sampler_of(["2", "5", "2", "it is 2.0", "3", "4", "4", "none"])
    batch = answered("sums", PROMPTS, sampler, Evaluation(completions=3, temperature=0.7), max_tokens=9)
    assert asked == [Sampling(0.0, 9, 1), Sampling(0.7, 9, 3)]
    assert batch.answers == [[2, 2, 3], [4, 4, None]]
    figures = dict(batch.figures())
    assert list(figures) == [3, 5]
    accuracies = ("greedy", "avg@3", "pass@2", "maj@3")
    assert [figures[3][name] for name in accuracies] == [1.0, pytest.approx(2 / 3), 1.0, 1.0]
    assert [figures[5][name] for name in accuracies] == [0.0, pytest.approx(2 / 3), 1.0, 1.0]
    assert sampler.take_seconds()["rollout"] == 0.0


def test_without_samples_only_the_greedy_answer_is_drawn() -> None:
    sampler, asked = sampler_of(["2", "5"])
    batch = answered("sums", PROMPTS, sampler, Evaluation(), max_tokens=9)
    assert asked == [Sampling(0.0, 9, 1)]
    assert [figures["greedy"] for _, figures in batch.figures()] == [1.0, 0.0]


def test_settings_that_measure_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`data.evaluation.temperature` expected to be > 0, but got 0"):
        Evaluation(completions=4, temperature=0.0)
    with pytest.raises(ConfigError, match=r"`data.evaluation.predictions` expected a file that ends in .jsonl"):
        Evaluation(predictions="answers.csv")
    assert Evaluation(temperature=0.0).completions == 0
