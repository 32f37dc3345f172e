"""A run at the floor ends after so many steps in a row, and says of what."""

import math
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
from lightning.pytorch import Trainer

from callbacks import EarlyStop
from grpo_lit.errors import ConfigError
from grpo_lit.module import GRPOModule
from grpo_lit.rollouts.minibatch import Minibatch


def stops_at(callback: EarlyStop, steps: list[dict[str, float]]) -> int | None:
    trainer: Any = Mock(spec=Trainer, should_stop=False)
    for step, values in enumerate(steps, 1):
        trainer.global_step = step
        callback.on_step_finished(trainer, Mock(spec=GRPOModule), Mock(spec=Minibatch), values)
        if trainer.should_stop:
            return step
    return None


def seen(entropy: float, reward: float | None = None) -> dict[str, float]:
    values = {"exploration/entropy": entropy}
    return values if reward is None else values | {"reward/total": reward}


HEALTHY, FLAT, NOTHING, BOTH = seen(0.5, 0.5), seen(0.005, 0.5), seen(0.5, 0.0), seen(0.005, 0.0)


@pytest.mark.parametrize(
    ("arguments", "steps", "expected"),
    [
        ({}, [FLAT, FLAT, FLAT], 3),
        ({}, [FLAT, FLAT, HEALTHY, FLAT, FLAT], None),
        ({}, [NOTHING] * 5, None),  # no floor for the reward
        ({}, [seen(math.nan, 0.5)] * 5, None),
        ({"reward": 0.0}, [FLAT, NOTHING, BOTH], 3),
        ({"reward": 0.0, "when": "all"}, [BOTH, BOTH, FLAT, BOTH, BOTH, BOTH], 6),
        ({"reward": 0.0, "entropy": None}, [NOTHING, NOTHING, seen(0.5), FLAT], 3),  # no new rollout: the last reward
        ({"reward": 0.0, "entropy": None}, [seen(0.5)] * 5, None),
    ],
)
def test_steps_in_a_row_at_the_floor_end_the_run(
    arguments: dict[str, Any], steps: list[dict[str, float]], expected: int | None
) -> None:
    with pytest.warns(UserWarning, match="EarlyStop ends") if expected else nullcontext():
        assert stops_at(EarlyStop(**{"patience": 3, **arguments}), steps) == expected


def test_it_says_what_was_seen():
    with pytest.warns(UserWarning, match=r"step 1, after 1 .*: exploration/entropy 0\.005 is below 0\.01 and reward"):
        stops_at(EarlyStop(reward=0.0, patience=1), [BOTH])
    with pytest.warns(UserWarning, match=r"floor: reward/total 0 is not above 0\."):
        stops_at(EarlyStop(reward=0.0, patience=1), [NOTHING])


def test_the_count_survives_a_resume():
    first, second = EarlyStop(reward=0.0, patience=3), EarlyStop(reward=0.0, patience=3)
    assert stops_at(first, [NOTHING, NOTHING]) is None
    second.load_state_dict(first.state_dict())
    with pytest.warns(UserWarning, match="step 1, after 3"):
        assert stops_at(second, [seen(0.5)]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"), [({"entropy": None}, "`entropy` or `reward`"), ({"patience": 0}, "`patience`")]
)
def test_what_would_never_stop_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EarlyStop(**arguments)
