"""What importance sampling does to the expected gradient when the engine is not the learner, against theory.

Notation: mu is the engine, pi the policy (old = current, so every surrogate's ratio is 1), rho_t = pi_t / mu_t, and
c_t = min(rho_t, cap). Mean-only advantage, w = 1/(G L): with z = sum_t c_t grad l_t of a completion drawn from mu,

    E[g] = (G-1)/(G L) (E_mu[R z] - E_mu[R] E_mu[z])                                                             (*)

since a member's own reward is left in its baseline, and rewards of others are independent of z.
"""

import pytest
import torch

from grpo_lit.lab.enumeration import estimate, single_group_steps
from grpo_lit.lab.world import Policies, World
from grpo_lit.objectives import (
    ConstantLength,
    Correction,
    GroupAdvantage,
    Objective,
    PolicyGradient,
    SequenceTruncatedIS,
    TruncatedIS,
)

SIZE = 2


def expected(corrections: list[Correction], world: World, logits: torch.Tensor, engine: torch.Tensor) -> torch.Tensor:
    objective = Objective(
        GroupAdvantage("none"), PolicyGradient(), ConstantLength(world.max_length), corrections=corrections
    )
    return estimate(objective, single_group_steps(world, Policies(logits, engine), SIZE)).mean


@pytest.fixture(scope="module")
def one_token() -> tuple[World, torch.Tensor, torch.Tensor]:
    world = World(
        vocabulary=4, max_length=1, scorer=lambda _, tokens: (float(tokens[0] ** 2),), score_names=("square",)
    )
    return world, world.random_logits(1.0, 1), world.random_logits(1.0, 2)


def test_truncated_bias_of_one_token_in_closed_form(one_token):
    # One token: E_mu[c h] = sum_v mu min(pi/mu, cap) h = sum_v min(pi, cap mu) h. Where nothing is cut that is E_pi[h];
    # the mass e_v = max(pi_v - cap mu_v, 0) is lost. With m = E_mu[R], (*) reads
    # E[g] = (G-1)/(G L) [grad J - sum_v e_v (R_v - m) grad log pi_v]: the bias is the second term.
    world, logits, engine = one_token
    cap, pi, mu = 1.2, logits[0].softmax(-1), engine[0].softmax(-1)
    lost, score = (pi - cap * mu).clamp(min=0), torch.eye(4, dtype=torch.float64) - pi
    rewards = world.rewards[0][[world.completions.index((v,)) for v in range(4)]]
    bias = -(lost * (rewards - (mu * rewards).sum())) @ score
    want = (SIZE - 1) / SIZE * (world.policy_gradient(logits)[0] + bias)
    torch.testing.assert_close(expected([TruncatedIS(cap)], world, logits, engine), want, rtol=0, atol=1e-12)
    assert bias.norm() > 0.1 * world.policy_gradient(logits).norm()


def test_untruncated_is_exact_for_one_token(one_token):
    # No ratio reaches the cap: e = 0.
    world, logits, engine = one_token
    want = (SIZE - 1) / SIZE * world.policy_gradient(logits).flatten()
    torch.testing.assert_close(expected([TruncatedIS(1e6)], world, logits, engine), want, rtol=0, atol=1e-12)


def test_no_correction_follows_another_gradient(one_token):
    # c = 1: E_mu[R grad log pi] - E_mu[R] E_mu[grad log pi] = sum_v mu_v (R_v - m) grad log pi_v.
    world, logits, engine = one_token
    pi, mu = logits[0].softmax(-1), engine[0].softmax(-1)
    rewards = world.rewards[0][[world.completions.index((v,)) for v in range(4)]]
    want = (SIZE - 1) / SIZE * (mu * (rewards - (mu * rewards).sum())) @ (torch.eye(4, dtype=torch.float64) - pi)
    torch.testing.assert_close(expected([], world, logits, engine), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cap", [1.2, 1e6])
def test_truncated_bias_of_several_tokens(world, logits, cap):
    # (*) by plain loops over completions and their tokens, prompt by prompt. Even uncut, token ratios are not exact for
    # more than one token: c_t leaves the prefix, and the tokens that follow, to the engine.
    engine = world.random_logits(1.0, 8)
    pi, mu = logits.softmax(-1), engine.softmax(-1)
    mass = world.completion_logprobs(engine).exp()
    want = torch.zeros_like(logits)
    for x in range(world.prompts):
        mean = float((mass[x] * world.rewards[x]).sum())
        for y, completion in enumerate(world.completions):
            for t, token in enumerate(completion):
                context = x * len(world.prefixes) + world.prefixes.index(completion[:t])
                factor = min(float(pi[context, token] / mu[context, token]), cap)
                push = mass[x, y] * (world.rewards[x, y] - mean) * factor / world.prompts
                want[context, token] += push
                want[context] -= push * pi[context]
    got = expected([TruncatedIS(cap)], world, logits, engine)
    scale = (SIZE - 1) / SIZE / world.max_length
    torch.testing.assert_close(got, scale * want.flatten(), rtol=0, atol=1e-12)
    truth = scale * world.policy_gradient(logits).flatten()
    assert (got - truth).norm() > 0.1 * truth.norm()


def test_the_product_over_the_sequence_is_exact(world, logits):
    # With c = prod_t rho_t for all tokens, z = rho s: E_mu[R rho s] = E_pi[R s] = grad J and E_mu[rho s] = 0.
    engine = world.random_logits(1.0, 8)
    want = (SIZE - 1) / SIZE / world.max_length * world.policy_gradient(logits).flatten()
    got = expected([SequenceTruncatedIS(1e8, ratio="product")], world, logits, engine)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
