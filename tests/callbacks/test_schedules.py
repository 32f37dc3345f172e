"""Schedules at given steps, and a closed loop that holds a toy policy's entropy at its target."""

import math
from collections.abc import Callable

import pytest
import torch

from callbacks import Constant, Cosine, EntropyLoop, Linear, Schedule, Step
from grpo_lit.errors import ConfigError
from grpo_lit.objectives import Terms, TokenClip


@pytest.mark.parametrize(
    ("schedule", "expected", "extremes"),
    [
        (Constant(0.2), {0: 0.2, 99: 0.2}, {0.2}),
        (Linear(0.1, 0.3, 4), {0: 0.1, 1: 0.15, 2: 0.2, 4: 0.3, 5: 0.3, 99: 0.3}, {0.1, 0.3}),
        (Linear(0.3, 0.1, 4), {0: 0.3, 1: 0.25, 4: 0.1, 99: 0.1}, {0.1, 0.3}),
        # cos(pi / 3) = 1 / 2: at a third of the way a quarter of it is done.
        (Cosine(0.4, 0.2, 6), {0: 0.4, 2: 0.35, 3: 0.3, 4: 0.25, 6: 0.2, 99: 0.2}, {0.2, 0.4}),
        (Step({0: 0.2, 10: 0.28, 20: 0.1}), {0: 0.2, 9: 0.2, 10: 0.28, 19: 0.28, 20: 0.1, 99: 0.1}, {0.2, 0.28, 0.1}),
    ],
    ids=["constant", "rising", "falling", "cosine", "step"],
)  # fmt: skip
def test_values_at_steps(schedule: Schedule, expected: dict[int, float], extremes: set[float]) -> None:
    assert {step: schedule(step) for step in expected} == pytest.approx(expected)
    assert set(schedule.extremes) == extremes


def test_the_loop_moves_towards_its_target_and_stays_in_its_range():
    loop = EntropyLoop(target=0.5, start=0.25, rate=0.1, minimum=0.2, maximum=0.4)
    seen = []
    for entropy in (0.1, 0.1, 0.1, 0.5, math.nan, 0.9, 0.9, 0.9):
        seen.append(loop(len(seen)))
        loop.observe({"exploration/entropy": entropy})
    assert seen == pytest.approx([0.25, 0.35, 0.4, 0.4, 0.4, 0.4, 0.3, 0.2])
    assert loop(8) == pytest.approx(0.2)


def test_a_resumed_loop_goes_on_within_the_range_of_now():
    loop = EntropyLoop(target=0.5, start=0.25, rate=0.1, minimum=0.2, maximum=0.4)
    loop.observe({"exploration/entropy": 0.1})
    for maximum, expected in ((0.4, 0.35), (0.3, 0.3)):
        other = EntropyLoop(target=0.5, start=0.25, minimum=0.2, maximum=maximum)
        other.load_state_dict(loop.state_dict())
        assert other(0) == pytest.approx(expected)


def entropy_at_the_end(high: Schedule) -> float:
    """Return the mean entropy over the last 25 of 80 rollouts of 64 bandits of 8 arms, each pull worth +-1 by luck.

    Four updates on 8 pulls carry the ratio of a rare arm to its bound: what luck adds to it, and so the entropy, grows
    with the upper one.
    """
    torch.manual_seed(0)
    logits, surrogate, entropies = torch.randn(64, 8), TokenClip(low=0.3), []
    bandit = torch.arange(64).repeat_interleave(8)
    ones = torch.ones(len(bandit), dtype=torch.long)
    for step in range(80):
        surrogate.high = high(step)
        old = logits.log_softmax(1)
        arms = torch.multinomial(old.exp(), 8, replacement=True).flatten()
        sampled, advantages = old[bandit, arms], torch.randint(0, 2, arms.shape) * 2.0 - 1
        for _ in range(4):
            logits.requires_grad_()
            logprobs = logits.log_softmax(1)[bandit, arms]
            terms = Terms(
                logprobs, sampled, sampled, None, sampled, advantages, ones, torch.arange(len(ones)), ones * 0
            )
            (gradient,) = torch.autograd.grad(surrogate(terms).value.sum() / 16, logits)
            logits = (logits + gradient).detach()
        final = logits.log_softmax(1)
        entropies.append(-float((final.exp() * final).sum(1).mean()))
        high.observe({"exploration/entropy": entropies[-1]})
    return sum(entropies[-25:]) / 25


def test_a_closed_loop_holds_the_entropy_at_its_target():
    assert entropy_at_the_end(Constant(0.05)) < 0.7
    assert entropy_at_the_end(Constant(1.0)) > 1.1
    loop = EntropyLoop(target=0.9, start=0.3, rate=0.04, minimum=0.05, maximum=1.0)
    assert entropy_at_the_end(loop) == pytest.approx(0.9, abs=0.05)
    assert 0.05 < loop(80) < 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linear(0.1, 0.2, 0), "`steps` of Linear"),
        (lambda: Cosine(0.1, 0.2, 0), "`steps` of Cosine"),
        (lambda: Step({}), "`values` of Step.*step 0"),
        (lambda: Step({5: 0.1}), "`values` of Step.*step 0"),
        (lambda: EntropyLoop(start=0.6), "`start` of EntropyLoop"),
        (lambda: EntropyLoop(rate=0.0), "`rate` of EntropyLoop"),
        (lambda: EntropyLoop(target=math.nan), "`target` of EntropyLoop"),
    ],
)
def test_what_is_no_schedule_is_refused(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
