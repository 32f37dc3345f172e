"""bf16 weights move at the learning rates of reinforcement learning, and float32 ones as under AdamW."""

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR

from grpo_lit.optimizers import MasterWeights, StochasticAdamW, stochastically_rounded, warn_of_lost_updates

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
plain = partial(AdamW, **SETTINGS)
OURS: dict[str, Callable[..., Optimizer]] = {
    "masters": partial(MasterWeights, optimizer=plain),
    "stochastic": partial(StochasticAdamW, **SETTINGS),
}


def gradients(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(40, 30, generator=generator).bfloat16() for _ in range(steps)]


def trained(make: Callable[..., Optimizer], weights: Tensor, steps: list[Tensor]) -> tuple[Tensor, Optimizer]:
    parameter = torch.nn.Parameter(weights.clone())
    optimizer = make([parameter])
    for gradient in steps:
        parameter.grad = gradient.to(weights.dtype)
        optimizer.step()
    return parameter.detach(), optimizer


@pytest.mark.parametrize("name", OURS)
def test_float32_weights_train_as_under_adamw_to_the_last_bit(name: str) -> None:
    weights = torch.randn(40, 30)
    expected, _ = trained(plain, weights, gradients(5))
    found, _ = trained(OURS[name], weights, gradients(5))
    assert torch.equal(found, expected)


def test_bf16_weights_are_their_masters_rounded() -> None:
    weights = torch.randn(40, 30).bfloat16()
    expected, _ = trained(plain, weights.float(), gradients(5))  # the same bf16 gradients
    found, optimizer = trained(OURS["masters"], weights, gradients(5))
    (state,) = optimizer.state.values()
    assert torch.equal(state["master"], expected)
    assert torch.equal(found, expected.bfloat16())


@pytest.mark.parametrize(
    ("make", "far"),
    [
        # Field bug A12. The neighbours of 1 are 1/256 below and 1/128 above: 100 steps of 1e-6 in one direction stay
        # where they are, each rounded back.
        (AdamW, 0.0),
        # A weight goes up by 1/128 with probability 128e-6 a step. Of 9e4 weights the mean after 100 steps is 1e-4 with
        # a standard deviation of sqrt(1e-4 / 128 / 9e4) = 2.9e-6.
        (StochasticAdamW, 1e-4),
    ],
)
def test_many_small_steps_go_far_in_the_mean(make: Callable[..., Optimizer], far: float) -> None:
    upwards = [-torch.ones(300, 300)] * 100
    moved, _ = trained(partial(make, lr=1e-6, weight_decay=0.0), torch.ones(300, 300).bfloat16(), upwards)
    assert float((moved.double() - 1).mean()) == pytest.approx(far, abs=1.2e-5 if far else 0)


def test_masters_take_small_steps_until_the_weight_follows() -> None:
    # Half of the way from 1 to its neighbour above is 1/256 = 3.9e-3: 3 steps of 1e-3 stay below it, 4 go beyond.
    make = partial(MasterWeights, optimizer=partial(AdamW, lr=1e-3, weight_decay=0.0))
    ends = [float(trained(make, torch.ones(1).bfloat16(), [-torch.ones(1)] * steps)[0]) for steps in (3, 4)]
    assert ends == [1.0, 1.0 + 1 / 128]


@pytest.mark.parametrize("value", [1.001, -1.001, 3e-5])
def test_rounding_at_random_is_right_in_the_mean(value: float) -> None:
    values = torch.full((400_000,), value)
    rounded = stochastically_rounded(values).double()
    assert len(rounded.unique()) == 2
    # Of n values with spacing h: standard deviation of the mean is below h / (2 sqrt n) = h / 1265.
    spacing = float(rounded.unique().diff())
    assert float(rounded.mean()) == pytest.approx(float(values[0].double()), abs=4 * spacing / 1265)


def test_what_is_exact_in_bf16_or_not_finite_stays() -> None:
    values = torch.cat([torch.randn(1000).bfloat16().float(), torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])])
    torch.testing.assert_close(stochastically_rounded(values).float(), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", OURS)
def test_a_resumed_optimizer_goes_on_bit_for_bit(name: str) -> None:
    weights, steps = torch.randn(40, 30).bfloat16(), gradients(6)
    straight, all_of_it = trained(OURS[name], weights, steps)
    halfway, optimizer = trained(OURS[name], weights, steps[:3])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)

    def resumed(parameters: list[Tensor]) -> Optimizer:
        made = OURS[name](parameters)
        made.load_state_dict(torch.load(file, weights_only=True))
        return made

    end, optimizer = trained(resumed, halfway, steps[3:])
    assert torch.equal(end, straight)
    for found, expected in zip(optimizer.state.values(), all_of_it.state.values(), strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) and found[key].dtype == torch.float32 for key in found)


@pytest.mark.parametrize("name", OURS)
def test_a_schedule_reaches_the_steps(name: str) -> None:
    def steps(start: float) -> Tensor:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = OURS[name]([parameter])
        schedule = LinearLR(optimizer, start_factor=start, total_iters=2)
        for _ in range(2):
            parameter.grad = torch.ones(1)
            optimizer.step()
            schedule.step()
        return parameter.detach()

    # Adam's steps on a constant gradient are the learning rate: 1 + 1 of it, or 0.5 + 0.75.
    assert float(steps(0.5) / steps(1.0)) == pytest.approx(1.25 / 2, rel=1e-3)


def test_replicas_round_alike_and_other_seeds_and_steps_differently() -> None:
    weights, steps = torch.ones(100, 100).bfloat16(), [torch.ones(100, 100)] * 2
    ends = [trained(partial(StochasticAdamW, lr=1e-3, seed=seed), weights, steps)[0] for seed in (0, 0, 1)]
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_bf16_weights_under_another_optimizer_are_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    weights = [torch.nn.Parameter(torch.ones(2).bfloat16())]
    for make in OURS.values():
        warn_of_lost_updates(make(weights))
    warn_of_lost_updates(plain([torch.nn.Parameter(torch.ones(2))]))
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"bf16-true: an update below 1/256.*StochasticAdamW"):
        warn_of_lost_updates(plain(weights))
