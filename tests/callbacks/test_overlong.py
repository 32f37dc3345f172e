"""DAPO's soft penalty: values by length, what it leaves alone, and what it cannot work with."""

from typing import Any
from unittest.mock import Mock

import pytest
from lightning.pytorch import Trainer

from callbacks import SoftOverlong
from grpo_lit.errors import ConfigError
from grpo_lit.module import GRPOModule
from grpo_lit.objectives import GDPOAdvantage, Objective
from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Completion, Group, Prompt, Sampling
from grpo_lit.rollouts.minibatch import Minibatch


def run(max_tokens: int = 20, **objective: Any) -> tuple[Any, Any]:
    ranks = Mock(spec=Ranks, sum=lambda x: x, max=lambda x: x)
    module = Mock(spec=GRPOModule, objective=Objective(**objective), ranks=ranks)
    return Mock(spec=Trainer, datamodule=Mock(sampling=Sampling(max_tokens=max_tokens)), global_step=1), module


def group(lengths: list[int], rewards: list[float | None]) -> Group:
    completions = tuple(Completion((1,) * n, (-1.0,) * n, "", "stop", 0) for n in lengths)
    correct = [reward == 1.0 for reward in rewards]
    return Group(Prompt("p", "?"), 0, completions, {"r": list(rewards)}, list(rewards), correct)


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_the_penalty_grows_over_the_cache(weight: float) -> None:
    callback, (trainer, module) = SoftOverlong(max_length=20, cache=4, weight=weight), run()
    callback.on_fit_start(trainer, module)
    it = group([0, 16, 17, 18, 20, 21], [1.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    callback.on_groups_scored(trainer, module, [it])
    penalties = [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    expected = [reward + weight * p for reward, p in zip([1.0, 1.0, 1.0, 0.0, 0.0, 1.0], penalties, strict=True)]
    assert it.rewards == pytest.approx(expected)
    assert it.scores["r"] == [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    assert it.correct == [True, True, True, False, False, True]


def test_means_are_logged_over_all_rounds_of_the_step_and_once():
    callback, (trainer, module) = SoftOverlong(max_length=20, cache=4), run()
    callback.on_fit_start(trainer, module)
    callback.on_groups_scored(trainer, module, [group([20, 10], [1.0, 0.0]), group([18, 20], [1.0, None])])
    callback.on_groups_scored(trainer, module, [group([18], [0.0])])
    for _ in range(2):  # a rollout of two updates
        callback.on_step_finished(trainer, module, Mock(spec=Minibatch), {})
    # The dropped sample does not count: -1, 0, -.5 and -.5.
    module.log_at.assert_called_once_with(0, {"reward/overlong_penalty": -0.5, "length/overlong": 0.75})


def test_limits_default_to_the_sampling_and_the_papers_share():
    callback = SoftOverlong()
    callback.on_fit_start(*run(max_tokens=20480))
    assert (callback.max_length, callback.cache) == (20480, 4096)
    assert callback.penalty(16384) == 0
    assert callback.penalty(18432) == -0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cache": 0}, "`cache` of SoftOverlong"),
        ({"max_length": 0}, "`max_length` of SoftOverlong"),
        ({"weight": 0.0}, "`weight` of SoftOverlong"),
        ({"cache": 21}, r"20 - 21.*every answer is punished"),
        ({"max_length": 40, "cache": 10}, r"`data\.sampling\.max_tokens` \(20\)"),
    ],
)
def test_what_is_no_penalty_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SoftOverlong(**arguments).on_fit_start(*run())


def test_an_advantage_that_reads_no_total_contradicts():
    with pytest.raises(ConfigError, match=r"SoftOverlong.*GDPOAdvantage.*contradict"):
        SoftOverlong().on_fit_start(*run(advantage=GDPOAdvantage()))
