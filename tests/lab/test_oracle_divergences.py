"""What each estimate of the KL does to the expected gradient, against theory.

Notation: l_t = log pi(y_t | c_t), q_t = log ref(y_t | c_t) - l_t, with c_t the prompt and the tokens before t. The
reward is the same for every completion, so advantages are 0 and only the penalty is left; w = 1/G, so a step's gradient
is minus the mean over its members of sum_t dk_t/dl_t grad l_t. All is exact, so G = 1 serves as well as any.
"""

import pytest
import torch

from grpo_lit.lab.enumeration import estimate, single_group_steps
from grpo_lit.lab.exact import context_probability, sequence_kl_gradient, token_kl_gradient
from grpo_lit.lab.world import Policies, World
from grpo_lit.objectives import K1, K2, K3, ConstantLength, Divergence, GroupAdvantage, Objective


def flat(prompt: int, tokens: tuple[int, ...]) -> tuple[float]:
    return (1.0,)


def penalty_gradient(divergence: Divergence, world: World, policies: Policies) -> torch.Tensor:
    """Expected gradient of the penalty, uphill: minus what the estimator does."""
    objective = Objective(GroupAdvantage("none"), reduction=ConstantLength(1), divergence=divergence)
    return -estimate(objective, single_group_steps(world, policies, 1)).mean


@pytest.fixture(scope="module")
def silent() -> World:
    return World(vocabulary=3, max_length=2, prompts=2, scorer=flat, score_names=("flat",))


@pytest.fixture(scope="module")
def on_policy(silent) -> Policies:
    logits = silent.random_logits(1.0, 3)
    return Policies(logits, logits, reference=silent.random_logits(1.0, 4))


@pytest.fixture(scope="module")
def stale(silent, on_policy) -> Policies:
    old = silent.random_logits(1.0, 5)
    return Policies(on_policy.current, old, old=old, reference=on_policy.reference)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want.flatten(), rtol=0, atol=1e-12)


def test_token_kl_gradient_by_plain_loops(silent, on_policy, scores_of):
    # sum_c d(c) sum_v pi(v|c) log(pi/ref) grad log pi(v|c); the derivative of log pi itself has mean 0. As a sum over
    # completions, E[sum_t (l_t - log ref_t) grad l_t]: loops over completions and their tokens.
    want = torch.zeros_like(on_policy.current)
    pi, ref = on_policy.current.softmax(-1), on_policy.reference.softmax(-1)
    mass = silent.completion_logprobs(on_policy.current).exp() / 2
    for x in range(2):
        for y, completion in enumerate(silent.completions):
            for t, token in enumerate(completion):
                context = x * 3 + silent.prefixes.index(completion[:t])
                gap = torch.log(pi[context, token] / ref[context, token])
                want[context, token] += mass[x, y] * gap
                want[context] -= mass[x, y] * gap * pi[context]
    close(token_kl_gradient(silent, on_policy.current, on_policy.reference).flatten(), want)


def test_k1_in_the_loss_pulls_at_nothing(silent, on_policy):
    # dk1/dl = 1: E[sum_t grad l_t] = E[s] = 0, wherever the reference is. It only adds noise.
    close(penalty_gradient(K1(beta=1.0), silent, on_policy), torch.zeros_like(on_policy.current))
    objective = Objective(GroupAdvantage("none"), reduction=ConstantLength(1), divergence=K1(beta=1.0))
    assert estimate(objective, single_group_steps(silent, on_policy, 1)).variance > 0.1


def test_k2_is_the_kl_of_the_next_token(silent, on_policy):
    # dk2/dl = -q = log(pi / ref), and E_v[log(pi/ref) grad l] = grad KL(pi(.|c) || ref(.|c)) in every context, prefixes
    # held: exactly token_kl_gradient.
    want = token_kl_gradient(silent, on_policy.current, on_policy.reference)
    close(penalty_gradient(K2(beta=1.0), silent, on_policy), want)


def test_what_k2_lacks_of_the_whole_kl(silent, on_policy, scores_of):
    # grad KL(whole) = E[s sum_u (l_u - log ref_u)] = E[sum_t grad l_t sum_{u>=t} (l_u - log ref_u)] (a past gap times a
    # later score has mean 0). k2 keeps u = t; the rest, u > t, is what a token does to the KL of those after it. With
    # length 2 that is one term, first score times second gap.
    want = torch.zeros_like(on_policy.current)
    pi, ref = on_policy.current.softmax(-1), on_policy.reference.softmax(-1)
    mass = silent.completion_logprobs(on_policy.current).exp() / 2
    for x in range(2):
        for y, completion in enumerate(silent.completions):
            if len(completion) == 2:
                first, second = x * 3, x * 3 + silent.prefixes.index(completion[:1])
                gap = torch.log(pi[second, completion[1]] / ref[second, completion[1]])
                want[first, completion[0]] += mass[x, y] * gap
                want[first] -= mass[x, y] * gap * pi[first]
    whole = sequence_kl_gradient(silent, on_policy.current, on_policy.reference).flatten()
    got = penalty_gradient(K2(beta=1.0), silent, on_policy)
    close(whole - got, want)
    assert want.norm() > 0.1 * whole.norm()


def test_k2_is_the_whole_kl_for_one_token():
    # With one token there is nothing after it.
    world = World(vocabulary=4, max_length=1, scorer=flat, score_names=("flat",))
    logits, reference = world.random_logits(1.0, 1), world.random_logits(1.0, 2)
    got = penalty_gradient(K2(beta=1.0), world, Policies(logits, logits, reference=reference))
    close(got, sequence_kl_gradient(world, logits, reference))


def test_k3_is_the_forward_kl(silent, on_policy):
    # dk3/dl = 1 - exp(q) = 1 - ref/pi: E_v[(1 - ref/pi) grad l] = -sum_v ref(v) grad log pi(v) = pi - ref in logits,
    # the gradient of KL(ref(.|c) || pi(.|c)), in every context as often as the policy passes it.
    often = context_probability(silent, on_policy.current)[:, None]
    want = often * (on_policy.current.softmax(-1) - on_policy.reference.softmax(-1))
    got = penalty_gradient(K3(beta=1.0), silent, on_policy)
    close(got, want)
    reverse = token_kl_gradient(silent, on_policy.current, on_policy.reference).flatten()
    assert (got - reverse).norm() > 0.3 * reverse.norm()


def test_k3_equals_the_kl_near_the_reference(silent, on_policy):
    # Both KLs have the Fisher matrix as Hessian, so k3 and k2 agree to first order in the distance h: their gap over
    # the gradient's own size falls with h.
    def gap(h: float) -> float:
        near = Policies(on_policy.current, on_policy.current, reference=on_policy.current + h * on_policy.reference)
        k2, k3 = (penalty_gradient(part, silent, near) for part in (K2(beta=1.0), K3(beta=1.0)))
        return float((k2 - k3).norm() / k2.norm())

    assert gap(0.01) == pytest.approx(gap(0.1) / 10, rel=0.2)
    assert gap(0.01) < 0.02


def test_ratio_weighted_k3_is_the_kl_off_policy(silent, stale):
    # d(r k3)/dl = r k3 + r (1 - exp q) = -r q = r log(pi/ref), and E_old[r log(pi/ref) grad l] over the next token is
    # grad KL(pi(.|c) || ref(.|c)) in every context, as often as the old policy passes it (token ratios leave prefixes).
    want = token_kl_gradient(silent, stale.current, stale.reference, sampler=stale.sampler)
    close(penalty_gradient(K3(beta=1.0, weighting="ratio"), silent, stale), want)
    assert (penalty_gradient(K3(beta=1.0), silent, stale) - want.flatten()).norm() > 0.1 * want.norm()


def test_ratio_weighted_k1_is_the_kl_off_policy(silent, stale):
    # d(r k1)/dl = r k1 + r: the second term has mean E_pi[grad l] = 0 in every context, the first is that of k3 above.
    want = token_kl_gradient(silent, stale.current, stale.reference, sampler=stale.sampler)
    close(penalty_gradient(K1(beta=1.0, weighting="ratio"), silent, stale), want)


def test_ratio_weighted_k2_is_not_the_kl(silent, on_policy):
    # d(r k2)/dl = r (q^2 / 2 - q): on-policy it adds E[q^2 / 2 grad l] to what k2 alone does right.
    want = token_kl_gradient(silent, on_policy.current, on_policy.reference).flatten()
    got = penalty_gradient(K2(beta=1.0, weighting="ratio"), silent, on_policy)
    assert (got - want).norm() > 0.1 * want.norm()


def test_k1_in_the_reward_is_the_whole_kl(silent, on_policy):
    # R_i = const - beta sum_t k1_it with the group mean as baseline: (G-1)/G times the gradient of E[R] with the
    # penalty held, and that is -beta E[s sum_t k1_t] = -beta grad KL(whole): the gradient of k1 itself has mean 0.
    objective = Objective(GroupAdvantage("none"), reduction=ConstantLength(1), divergence=K1(beta=0.5, place="reward"))
    got = estimate(objective, single_group_steps(silent, on_policy, 2)).mean
    whole = sequence_kl_gradient(silent, on_policy.current, on_policy.reference)
    close(got, -0.5 / 2 * whole)
