"""What advantages and reductions do to the expected gradient, against theory.

Notation: one prompt at a time, s_i = grad log pi(y_i) = sum_t grad log pi(y_it | y_i<t), R_i = R(y_i), all i.i.d. from
pi, E[s] = 0 and E[R s] = grad J. On-policy a surrogate has gradient A_i grad log pi per token, so a step of one group
gives g = sum_i w_i A_i s_i.
"""

import itertools
import math

import pytest
import torch

from grpo_lit.lab.enumeration import estimate, single_group_steps
from grpo_lit.lab.world import Policies, World
from grpo_lit.objectives import ConstantLength, GroupAdvantage, Objective, SequenceMean, TokenMean
from grpo_lit.objectives.advantages import STD_EPS


def expected(objective: Objective, world: World, logits: torch.Tensor, size: int) -> torch.Tensor:
    return estimate(objective, single_group_steps(world, Policies(logits, logits), size)).mean


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_constant_length_and_mean_only_is_the_truth_times_a_factor(world, logits, size):
    # w = 1/(G L), A_i = R_i - mean_j R_j. E[R_j s_i] = E[R] E[s] = 0 for j != i and E[R_i s_i] = grad J, so
    # E[g] = 1/(G L) sum_i (1 - 1/G) grad J = (G-1)/G grad J / L: a member of its own baseline eats 1/G of its reward.
    objective = Objective(GroupAdvantage("none"), reduction=ConstantLength(2))
    want = (size - 1) / size / 2 * world.policy_gradient(logits).flatten()
    torch.testing.assert_close(expected(objective, world, logits, size), want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [2, 3])
def test_leaving_oneself_out_makes_the_factor_one(world, logits, size):
    # A_i = R_i - mean of the others: now no baseline holds its own reward, so E[g] = grad J / L.
    objective = Objective(GroupAdvantage("none", leave_one_out=True), reduction=ConstantLength(2))
    want = world.policy_gradient(logits).flatten() / 2
    torch.testing.assert_close(expected(objective, world, logits, size), want, rtol=0, atol=1e-10)


def test_sequence_mean_is_biased_by_the_lengths(world, logits, scores_of):
    # w_i = 1/(G len_i) depends on y_i, so it stays inside the expectations, and E[s / len] is not 0:
    # E[g] = (G-1)/G (E[R s / len] - E[R] E[s / len]), prompt by prompt.
    size = 3
    pi, score = world.completion_logprobs(logits).exp()[..., None], scores_of(world, logits)
    per_token, rewards = score / world.lengths[:, None], world.rewards[..., None]
    covariance = (pi * rewards * per_token).sum(1) - (pi * rewards).sum(1) * (pi * per_token).sum(1)
    want = (size - 1) / size * covariance.mean(0)
    got = expected(Objective(GroupAdvantage("none"), reduction=SequenceMean()), world, logits, size)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    # Not even the direction is right, with no more than two lengths: 14 degrees off.
    assert cosine(got, world.policy_gradient(logits).flatten()) == pytest.approx(0.9698, abs=1e-4)


def test_sequence_mean_does_not_bias_completions_of_one_length(scores_of):
    # With len_i = L for all i the weight is the constant 1/(G L): the claim of the first test again.
    world = World(vocabulary=3, max_length=1, prompts=1, scorer=lambda _, tokens: (float(tokens[0]),))
    logits = world.random_logits(1.0, 5)
    got = expected(Objective(GroupAdvantage("none"), reduction=SequenceMean()), world, logits, 3)
    torch.testing.assert_close(got, 2 / 3 * world.policy_gradient(logits).flatten(), rtol=0, atol=1e-10)


def test_token_mean_against_a_plain_sum_over_ordered_groups(world, logits, scores_of):
    # w = 1 / sum_j len_j joins the members of a group, so there is no product form: add up all ordered groups in plain
    # Python, g = sum_i (R_i - mean R) s_i / sum_j len_j.
    size, pi, score = 2, world.completion_logprobs(logits).exp(), scores_of(world, logits)
    want = torch.zeros_like(score[0, 0])
    for x, group in itertools.product(range(2), itertools.product(range(len(world.completions)), repeat=size)):
        rewards = [float(world.rewards[x, y]) for y in group]
        tokens = sum(len(world.completions[y]) for y in group)
        mass = math.prod(float(pi[x, y]) for y in group) / 2
        for y, reward in zip(group, rewards, strict=True):
            want += mass * (reward - sum(rewards) / size) / tokens * score[x, y]
    got = expected(Objective(GroupAdvantage("none"), reduction=TokenMean()), world, logits, size)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    assert cosine(got, world.policy_gradient(logits).flatten()) < 0.9995


def std_factor(success: float, size: int) -> float:
    """E[g] / (grad J / L) of the group-std advantage for a right-or-wrong reward with this chance of success.

    With k of G right: mean k/G, variance k (G-k) / (G (G-1)), sigma its root plus eps. Given k, a right member's score
    has mean grad p / p and a wrong one's - grad p / (1 - p), hence
    E[g | k] = 1/(G L) [k (1 - k/G) / p + (G - k) (k/G) / (1-p)] / sigma grad p
             = 1/(G^2 L) k (G - k) / (sigma p (1-p)) grad p.
    """
    total = 0.0
    for k in range(1, size):
        sigma = math.sqrt(k * (size - k) / (size * (size - 1))) + STD_EPS
        chance = math.comb(size, k) * success**k * (1 - success) ** (size - k)
        total += chance * k * (size - k) / (size**2 * sigma * success * (1 - success))
    return total


@pytest.fixture(scope="module")
def easy_and_hard() -> tuple[World, torch.Tensor]:
    """Tokens {end, 1}, completions (end), (1, end), (1, 1): right is to say 1 first, for the hard prompt (1, 1)."""

    def right(prompt: int, tokens: tuple[int, ...]) -> tuple[float]:
        return (float(tokens == (1, 1)) if prompt else float(tokens[0] == 1),)

    world = World(vocabulary=2, max_length=2, prompts=2, scorer=right, score_names=("correct",))
    # Chances of success: 1/2, and (1 / (1 + e))^2 = 0.072.
    return world, torch.tensor([[0, 0], [0.3, 0.1], [0, -1], [0, -1]], dtype=torch.float64)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_group_std_weighs_prompts_by_their_difficulty(easy_and_hard, size):
    # The factor of each prompt is std_factor(p): where that depends on p, prompts are re-weighted and the sum over
    # prompts points elsewhere. It does not with G = 2 or 3, where every group with signal has the same k (G - k): then
    # sum_k C(G,k) p^k q^(G-k) / (p q) is 2, or 3 (p + q) = 3.
    world, logits = easy_and_hard
    success = (world.completion_logprobs(logits).exp() * world.rewards).sum(-1).tolist()
    truth = world.policy_gradient(logits).view(2, -1) / 2
    got = expected(Objective(GroupAdvantage("group_std"), reduction=ConstantLength(2)), world, logits, size).view(2, -1)
    factors = [std_factor(p, size) for p in success]
    torch.testing.assert_close(got, torch.tensor(factors, dtype=torch.float64)[:, None] * truth, rtol=1e-10, atol=1e-12)
    assert factors[1] / factors[0] == pytest.approx({2: 1, 3: 1, 4: 1.0525, 8: 1.2959}[size], abs=1e-3)


def test_group_std_turns_graded_rewards_even_on_one_prompt(logits):
    # Three reward values: dividing by a random spread weighs groups apart, and no single factor is left.
    world = World(vocabulary=3, max_length=2, prompts=1, scorer=lambda _, tokens: (float(2 ** sum(tokens)),))
    mine = logits[: world.contexts]
    got = expected(Objective(GroupAdvantage("group_std"), reduction=ConstantLength(2)), world, mine, 3)
    assert cosine(got, world.policy_gradient(mine).flatten()) < 0.99
