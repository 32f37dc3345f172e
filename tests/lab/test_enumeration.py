import itertools

import pytest
import torch

from grpo_lit.errors import ConfigError
from grpo_lit.lab.enumeration import (
    Steps,
    estimate,
    has_signal,
    multisets,
    single_group_steps,
    step_gradients,
)
from grpo_lit.lab.world import Policies, World
from grpo_lit.objectives import (
    K1,
    K3,
    Advantage,
    ConstantLength,
    GroupAdvantage,
    Objective,
    OverlongFilter,
    SequenceClip,
    SequenceMean,
    TokenClip,
    TokenMean,
    TopEntropy,
    TruncatedIS,
    ZeroSignalFilter,
)


class Surprise(Advantage):
    """A part from elsewhere, which looks at more than rewards: how unlikely the answer was."""

    def __call__(self, batch, sum_ranks):
        return -torch.zeros_like(batch.rewards).index_add(0, batch.sequence, batch.sampler_logprobs)


OBJECTIVES = {
    "foreign": Objective(Surprise()),
    "default": Objective(),
    "batch_std": Objective(GroupAdvantage("batch_std"), reduction=TokenMean()),
    "everything": Objective(
        GroupAdvantage("none", leave_one_out=True),
        TokenClip(0.1, 0.1),
        TokenMean(),
        K3(beta=0.3),
        [TruncatedIS(1.2)],
        selection=TopEntropy(0.5),
        entropy_coefficient=0.7,
    ),
    "filters": Objective(filters=[OverlongFilter(), ZeroSignalFilter()], surrogate=SequenceClip(0.1, 0.1)),
    "kl in reward": Objective(GroupAdvantage("none"), divergence=K1(beta=0.5, place="reward")),
}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_multisets_have_the_mass_of_their_orders(world, logits, size):
    # P(multiset) = sum over its ordered tuples of prod pi: added up one ordered tuple at a time.
    members, probability = multisets(world, logits, size)
    pi = world.completion_logprobs(logits).exp()
    want = {tuple(m): torch.zeros(2, dtype=torch.float64) for m in members.tolist()}
    for tuple_ in itertools.product(range(len(world.completions)), repeat=size):
        want[tuple(sorted(tuple_))] += pi[:, list(tuple_)].prod(-1)
    torch.testing.assert_close(probability, torch.stack(list(want.values()), 1), rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_one_pass_over_all_steps_equals_step_by_step(world, logits, through_theta, name):
    other, third = world.random_logits(1.0, 11), world.random_logits(1.0, 12)
    steps = single_group_steps(world, Policies(logits, other, old=third, reference=other), 2)
    got = step_gradients(OBJECTIVES[name], steps)
    want = through_theta(OBJECTIVES[name], steps, every=4)
    torch.testing.assert_close(got[::4], want, rtol=1e-9, atol=1e-13)
    assert got.abs().max() > 1e-2


def test_order_within_a_group_does_not_matter(world, logits):
    members = torch.tensor(list(itertools.permutations([0, 2, 5])))
    policies = Policies(logits, logits)
    batch = world.batch(torch.zeros(6, dtype=torch.long), members, policies)
    got = step_gradients(Objective(), Steps(world, policies, batch, torch.arange(6), torch.ones(6).double() / 6))
    torch.testing.assert_close(got, got[:1].expand(6, -1), rtol=0, atol=1e-15)


def test_moments_by_hand():
    # One prompt, tokens {end, 1}, one step: completions (end) and (1), p = softmax. The reward is 1 for (end) alone.
    # G = 2, mean only, length 1: groups {end, end} and {1, 1} give 0; {end, 1} has probability 2pq, advantages +-1/2,
    # weights 1/2 and g = 1/2 (1/2 s(end) - 1/2 s(1)) with s(end) - s(1) = (1, -1): g = (1/4, -1/4).
    # E[g] = 2pq (1/4, -1/4) = (G-1)/G pq (1, -1); tr Cov = 2pq / 8 - (2pq)^2 / 8.
    world = World(vocabulary=2, max_length=1, scorer=lambda _, tokens: (float(tokens == (0,)),))
    logits = torch.tensor([[0.4, -0.3]], dtype=torch.float64)
    p, q = logits[0].softmax(-1).tolist()
    objective = Objective(GroupAdvantage("none"), reduction=ConstantLength(1))
    got = estimate(objective, single_group_steps(world, Policies(logits, logits), 2))
    assert got.mean.tolist() == pytest.approx([p * q / 2, -p * q / 2], abs=1e-15)
    assert got.variance == pytest.approx(2 * p * q / 8 - (2 * p * q) ** 2 / 8, abs=1e-15)


def test_monte_carlo_agrees_within_its_error(world, logits):
    # Completions are drawn token by token, without a list of groups or their probabilities. The bound is 5 standard
    # errors for each of the 18 logits.
    sampler, draws, size = world.random_logits(1.0, 21), 800, 3
    objective = Objective(GroupAdvantage("group_std"), TokenClip(0.2, 0.28), SequenceMean())
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(world.prompts, (draws,), generator=generator)
    members = torch.zeros(draws, size, dtype=torch.long)
    for n in range(draws):
        for i in range(size):
            said: tuple[int, ...] = ()
            while said not in world.completions:
                context = int(prompt[n]) * len(world.prefixes) + world.prefixes.index(said)
                said += (int(torch.multinomial(sampler[context].softmax(-1), 1, generator=generator)),)
            members[n, i] = world.completions.index(said)
    policies, even = Policies(logits, sampler, old=sampler), torch.ones(draws).double() / draws
    drawn = Steps(world, policies, world.batch(prompt, members, policies), torch.arange(draws), even)
    gradients = step_gradients(objective, drawn)
    exact = estimate(objective, single_group_steps(world, policies, size))
    error = gradients.std(0) / draws**0.5
    assert ((gradients.mean(0) - exact.mean).abs() <= 5 * error + 1e-12).all()
    assert float(gradients.var(0).sum()) == pytest.approx(exact.variance, rel=0.1)


def test_signal_is_told_by_the_extremes():
    rewards = torch.tensor([[0.3, 0.3, 0.3], [0.0, 1.0, 0.0]], dtype=torch.float64)
    assert has_signal(rewards).tolist() == [False, True]


def test_refuses_more_groups_than_it_can_hold():
    world = World(vocabulary=4, max_length=3)
    with pytest.raises(ConfigError, match="`group_size` 5"):
        multisets(world, world.random_logits(1.0, 0), 5)
