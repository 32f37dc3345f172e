import math
from dataclasses import replace

import pytest
import torch

from grpo_lit.errors import ConfigError
from grpo_lit.objectives import K1, K2, K3, Terms

KINDS = [K1, K2, K3]


def gradient(terms, value):
    (grad,) = torch.autograd.grad(value.sum(), terms.logprobs)
    return grad


def test_estimates_by_hand(make_terms, dtype):
    # logp - logp_ref = .5, q = -.5: k1 = .5, gradient 1; k2 = .125, gradient .5; k3 = e^-.5 - .5, gradient 1 - e^-.5.
    for part, value, slope in (
        (K1(), 0.5, 1.0),
        (K2(), 0.125, 0.5),
        (K3(), math.exp(-0.5) - 0.5, 1 - math.exp(-0.5)),
    ):
        terms = make_terms([0.5], 0.0, dtype=dtype)
        k = part(terms)
        torch.testing.assert_close(k, torch.tensor([value], dtype=dtype))
        torch.testing.assert_close(gradient(terms, k), torch.tensor([slope], dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_pay_at_the_reference(make_terms, dtype, kind):
    terms = make_terms([0.0, 0.0], 0.0, dtype=dtype)
    assert kind()(terms).tolist() == [0.0, 0.0]


def test_ratio_weighting_by_hand(make_terms, dtype):
    # Old policy = reference here, d = .5: r k3 with r = e^.5. k3 = e^-.5 - .5; d(r k3)/dlogp = r k3 + r (1 - e^-.5)
    # = r (.5) = .5 e^.5: the log-ratio times r, the gradient of the KL itself, where plain k3 has 1 - e^-.5.
    terms = make_terms([0.5], 0.0, dtype=dtype)
    penalty = K3(beta=2.0, weighting="ratio").penalty(terms)
    torch.testing.assert_close(penalty, torch.tensor([2 * math.exp(0.5) * (math.exp(-0.5) - 0.5)], dtype=dtype))
    torch.testing.assert_close(gradient(terms, penalty), torch.tensor([2 * 0.5 * math.exp(0.5)], dtype=dtype))


def test_length_normalisation_by_hand(make_terms):
    # k1 = .5 .5 | .5 with lengths 2 | 1 and beta .1: .025 .025 | .05.
    penalty = K1(beta=0.1, normalise="length").penalty(make_terms([0.5, 0.5, 0.5], [0.0, 0.0], lengths=[2, 1]))
    torch.testing.assert_close(penalty, torch.tensor([0.025, 0.025, 0.05]))


def test_beta_of_each_domain(make_terms):
    part = K1(beta={"math": 0.0, "code": 0.02, "default": 0.5})
    terms = make_terms(
        [1.0] * 3, [0.0] * 3, domain=torch.tensor([1, 2, 0]), domains=("code", "math", "science"), lengths=[1, 1, 1]
    )
    torch.testing.assert_close(part.penalty(terms), torch.tensor([0.0, 0.5, 0.02]))
    assert part.pays


def test_all_betas_zero_pay_nothing():
    assert not K3(beta=0.0).pays
    assert not K3(beta={"math": 0.0, "code": 0.0}).pays
    assert K3(beta={"math": 0.0, "code": 1e-9}).pays


def test_a_domain_without_a_beta_is_refused(make_terms):
    with pytest.raises(ConfigError, match=r"'poetry'.*\['math'\]"):
        K3(beta={"math": 0.1}).penalty(make_terms([0.0], 0.0, domains=("poetry",)))
    with pytest.raises(ConfigError, match=r"'poetry', but got only \['math'\]: name it, or add `default`"):
        K3(beta={"math": 0.1}).check_domains(["math", "poetry"])
    K3(beta={"math": 0.1, "default": 0.0}).check_domains(["math", "poetry"])
    K3(beta=0.1).check_domains(["poetry"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighting", ["none", "ratio"])
@pytest.mark.parametrize("logp", [-100.0, -1.0, -0.01])
@pytest.mark.parametrize("reference", [-100.0, -1.0, -0.01])
@pytest.mark.parametrize("old", [-100.0, -1.0])
def test_any_gap_is_finite_in_value_and_gradient(make_terms, dtype, kind, weighting, logp, reference, old):
    # Field bug A5.
    # A policy at -100 nats, a reference at -1: k3 overflows to inf, and clamping it afterwards makes inf * 0 = NaN.
    terms = make_terms(
        [0.0],
        0.0,
        dtype=dtype,
        logprobs=torch.tensor([logp], dtype=dtype, requires_grad=True),
        reference_logprobs=torch.tensor([reference], dtype=dtype),
        old_logprobs=torch.tensor([old], dtype=dtype),
    )
    penalty = kind(weighting=weighting).penalty(terms)
    assert torch.isfinite(penalty).all()
    assert torch.isfinite(gradient(terms, penalty)).all()


def test_the_furthest_token_is_still_pulled_back(make_terms):
    # logp 50 below the reference: descent on k3 must raise logp, so its gradient is negative and large, not 0.
    terms = make_terms([-50.0], 0.0)
    assert gradient(terms, K3()(terms)).item() < -1e8


def test_expected_on_policy_gradients_are_those_of_theory():
    # All outcomes of a categorical policy p against a reference: sum_y p_y dk_y / dtheta. k1: sum p dlog p = 0.
    # k2 and ratio-weighted k1, k3: the gradient of KL(p || ref). k3: that of KL(ref || p).
    logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, 0.4, 0.1], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    p = logp.exp().detach()
    forward = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)[0]
    backward = torch.autograd.grad((reference.exp() * (reference - logp)).sum(), logits, retain_graph=True)[0]
    expected = [
        (K1(), torch.zeros(3, dtype=torch.float64)),
        (K2(), forward),
        (K3(), backward),
        (K1(weighting="ratio"), forward),
        (K3(weighting="ratio"), forward),
    ]
    for part, truth in expected:
        grad = torch.autograd.grad((p * _penalty(part, logp, reference)).sum(), logits, retain_graph=True)[0]
        torch.testing.assert_close(grad, truth, msg=repr(part))


def _penalty(part, logp, reference):
    zeros = torch.zeros_like(reference)
    terms = Terms(
        logprobs=logp,
        old_logprobs=logp.detach(),
        sampler_logprobs=logp.detach(),
        reference_logprobs=reference,
        entropy=zeros,
        advantages=zeros,
        lengths=torch.ones(3, dtype=torch.long),
        sequence=torch.arange(3),
        domain=torch.zeros(3, dtype=torch.long),
    )
    return part.penalty(terms) / part.beta


@pytest.mark.parametrize("kind", KINDS)
def test_bad_settings_are_refused(kind):
    with pytest.raises(ConfigError, match=f"`beta` of {kind.__name__}.*-0.1"):
        kind(beta=-0.1)
    with pytest.raises(ConfigError, match="'code'"):
        kind(beta={"math": 0.0, "code": float("nan")})
    with pytest.raises(ConfigError, match=r"weighting: ratio.*place: reward"):
        kind(weighting="ratio", place="reward")


def test_a_rank_without_groups_needs_no_beta(make_batch):
    nothing = replace(make_batch([1, 0], lengths=[1, 1]).select(torch.zeros(0, dtype=torch.long)), domains=("default",))
    assert K3(beta={"math": 0.0, "code": 0.02}).coefficients(nothing).shape == (0,)
