"""What dynamic sampling (no step on groups whose rewards are all equal) does to the expected gradient, on two prompts.

A group without signal has advantages 0 and gradient 0. With P_x the chance that a group of prompt x has signal and
h_x = E[g | prompt x] over all its groups, E[g | prompt x, signal] = h_x / P_x: the zeros leave, their mass stays.
What becomes of the sum over prompts depends on what replaces a dropped group.
"""

import itertools

import pytest
import torch

from grpo_lit.lab.enumeration import Steps, estimate, has_signal, multisets, single_group_steps, step_gradients
from grpo_lit.lab.world import Policies, World
from grpo_lit.objectives import ConstantLength, GroupAdvantage, Objective, TokenMean

SIZE = 2
OBJECTIVE = Objective(GroupAdvantage("none"), reduction=ConstantLength(2))


@pytest.fixture(scope="module")
def two() -> tuple[World, Policies]:
    """An easy and a hard prompt with logits of their own; tokens {end, 1}, 3 completions, 6 groups of 2."""

    def right(prompt: int, tokens: tuple[int, ...]) -> tuple[float]:
        return (float(tokens == (1, 1)) if prompt else float(tokens[0] == 1),)

    world = World(vocabulary=2, max_length=2, prompts=2, scorer=right, score_names=("correct",))
    logits = torch.tensor([[0, 0], [0.3, 0.1], [0, -1], [0, -1]], dtype=torch.float64)
    return world, Policies(logits, logits)


@pytest.fixture(scope="module")
def signal(two) -> torch.Tensor:
    """P_x: two answers differ with probability 2 p (1 - p)."""
    world, policies = two
    success = (world.completion_logprobs(policies.current).exp() * world.rewards).sum(-1)
    return 2 * success * (1 - success)


@pytest.fixture(scope="module")
def truth(two) -> torch.Tensor:
    """Gradient of each prompt's own expected reward [X D], times (G-1)/G / L."""
    world, policies = two
    pair = world.policy_gradient(policies.current).view(2, -1) * 2 * (SIZE - 1) / SIZE / 2
    return torch.stack([torch.cat([pair[0], torch.zeros(4)]), torch.cat([torch.zeros(4), pair[1]])])


def test_chance_of_signal(two, signal):
    world, policies = two
    members, probability = multisets(world, policies.sampler, SIZE)
    for x in range(2):
        kept = has_signal(world.rewards[x, members])
        assert float(probability[x, kept].sum()) == pytest.approx(float(signal[x]), abs=1e-14)
    assert signal.tolist() == pytest.approx([0.5, 0.1342], abs=1e-4)


def test_one_prompt_is_only_scaled(two, signal, truth):
    # Conditioning on signal divides by P: same direction, a longer step.
    world, policies = two
    one = World(2, 2, 1, world.scorer, world.score_names)
    mine = Policies(policies.current[:2], policies.current[:2])
    got = estimate(OBJECTIVE, single_group_steps(one, mine, SIZE, dynamic_sampling=True)).mean
    torch.testing.assert_close(got, truth[0, :4] / signal[0], rtol=0, atol=1e-14)


def test_replacing_by_new_prompts_keeps_the_direction(two, signal, truth):
    # Draw a prompt, draw its group, start again without signal: P(x | kept) = P_x / sum P, so
    # E = sum_x P_x / (P_1 + P_2) h_x / P_x = (h_1 + h_2) / (P_1 + P_2): prompts with signal come more often, and weigh
    # less each time. The estimand is the truth over the mean chance of signal.
    world, policies = two
    got = estimate(OBJECTIVE, single_group_steps(world, policies, SIZE, dynamic_sampling=True)).mean
    torch.testing.assert_close(got, truth.sum(0) / signal.sum(), rtol=0, atol=1e-14)


def test_redrawing_the_same_prompt_turns_towards_hard_ones(two, signal, truth):
    # Every prompt is asked again until its group has signal, so each is in the step as often as drawn:
    # E = 1/2 sum_x h_x / P_x. The hard prompt weighs P_1 / P_2 = 3.7 times what it should against the easy one.
    world, policies = two
    members, probability = multisets(world, policies.sampler, SIZE)
    prompt = torch.arange(2).repeat_interleave(len(members))
    members = members.repeat(2, 1)
    kept = has_signal(world.rewards[prompt[:, None], members])
    chance = probability / signal[:, None] / 2
    prompt, members, chance = prompt[kept], members[kept], chance.flatten()[kept]
    steps = Steps(world, policies, world.batch(prompt, members, policies), torch.arange(len(prompt)), chance)
    assert float(chance.sum()) == pytest.approx(1, abs=1e-14)
    want = (truth / signal[:, None]).mean(0)
    torch.testing.assert_close(estimate(OBJECTIVE, steps).mean, want, rtol=0, atol=1e-14)
    assert float(signal[0] / signal[1]) == pytest.approx(3.7, abs=0.1)


def pairs(world: World, policies: Policies, drop: bool) -> Steps:
    """Steps of one group of each prompt; with ``drop``, groups without signal leave and nothing replaces them."""
    members, probability = multisets(world, policies.sampler, SIZE)
    kept_prompts, kept_members, step, chance = [], [], [], []
    for n, (first, second) in enumerate(itertools.product(range(len(members)), repeat=2)):
        chance.append(float(probability[0, first] * probability[1, second]))
        for x, group in enumerate((first, second)):
            if not drop or has_signal(world.rewards[x, members[group]][None]):
                kept_prompts.append(x)
                kept_members.append(members[group])
                step.append(n)
    prompt = torch.tensor(kept_prompts)
    batch = world.batch(prompt, torch.stack(kept_members), policies)
    return Steps(world, policies, batch, torch.tensor(step), torch.tensor(chance, dtype=torch.float64))


def test_dropping_without_replacement_turns_towards_prompts_with_signal(two, signal, truth):
    # A step holds one group of each prompt. Kept alone, a group is averaged over itself; with the other, over both:
    # E = sum_x h_x (P_other / 2 + 1 - P_other) = sum_x (1 - P_other / 2) h_x, against sum_x h_x / 2 when zeros stay in.
    # The prompt whose partner has signal less often is the one with more signal: it gains.
    world, policies = two
    everything = estimate(OBJECTIVE, pairs(world, policies, drop=False)).mean
    torch.testing.assert_close(everything, truth.mean(0), rtol=0, atol=1e-14)
    want = (1 - signal[1] / 2) * truth[0] + (1 - signal[0] / 2) * truth[1]
    got = estimate(OBJECTIVE, pairs(world, policies, drop=True)).mean
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


def test_token_mean_reweighs_prompts_when_groups_are_dropped(two):
    # With w = 1 / tokens of the step, dropping changes the divisor of those that stay: step by step the gradient with
    # drops is the one without, times tokens of all groups / tokens of the kept ones.
    world, policies = two
    objective = Objective(GroupAdvantage("none"), reduction=TokenMean())
    full, kept = pairs(world, policies, drop=False), pairs(world, policies, drop=True)
    tokens = [
        torch.zeros(36).index_add(0, steps.step[steps.batch.group], steps.batch.lengths.float()).double()
        for steps in (full, kept)
    ]
    factor = torch.where(tokens[1] > 0, tokens[0] / tokens[1].clamp(min=1), 0.0)
    want = factor[:, None] * step_gradients(objective, full)
    torch.testing.assert_close(step_gradients(objective, kept), want, rtol=0, atol=1e-14)
    assert factor.max() > 1.5
