import math

import pytest
import torch

from grpo_lit.errors import ConfigError
from grpo_lit.objectives import DPPO, SAPO


def gradient(terms, part):
    out = part(terms)
    (grad,) = torch.autograd.grad(out.value.sum(), terms.logprobs)
    return out, grad


def test_sapo_by_hand(make_terms, dtype):
    # r = 2, A = 1, tau 1: 4 sigmoid(1); d/dlogp = 4 s (1 - s) r = 8 s (1 - s). r = 2, A = -1, tau 2:
    # -2 sigmoid(2), gradient -(4/2) 2 s (1 - s) r = -8 s (1 - s) with s = sigmoid(2).
    terms = make_terms([math.log(2), math.log(2)], [1.0, -1.0], dtype=dtype)
    out, grad = gradient(terms, SAPO(positive=1.0, negative=2.0))
    s, u = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))
    torch.testing.assert_close(out.value, torch.tensor([4 * s, -2 * u], dtype=dtype))
    torch.testing.assert_close(grad, torch.tensor([8 * s * (1 - s), -8 * u * (1 - u)], dtype=dtype))


def test_sapo_has_the_policy_gradient_at_ratio_one(make_terms, dtype):
    # (4 / tau) tau sigmoid'(0) = 4 / 4 = 1, times A, for either temperature.
    _, grad = gradient(make_terms([0.0, 0.0], [1.5, -0.5], dtype=dtype), SAPO())
    torch.testing.assert_close(grad, torch.tensor([1.5, -0.5], dtype=dtype))


def test_sapo_fades_and_stays_finite(make_terms):
    # 4 s (1 - s) r with s = sigmoid(r - 1): 1 at r = 1, .05 at r = e^2, 2e-7 at r = e^3.
    _, grad = gradient(make_terms([0.0, 2.0, 3.0, 100.0, -100.0], 1.0), SAPO())
    assert grad[0] > grad[1] > grad[2] >= 0
    assert torch.isfinite(grad).all()


# Anchor probability .5, policy's .8 .6 .2 .4 .2 .8: p - q = .3 .1 -.3 -.1 -.3 .3, with A = + + - - + -.
# Bound .2: only the first (up with A > 0) and the third (down with A < 0) go on outwards beyond it.
MOVED = [0.8, 0.6, 0.2, 0.4, 0.2, 0.8]
SIGNS = [1.0, 1.0, -1.0, -1.0, 1.0, -1.0]


def moved_terms(make_terms, dtype, **override):
    half = torch.full((6,), 0.5, dtype=dtype).log()
    logprobs = torch.tensor(MOVED, dtype=dtype).log().requires_grad_()
    anchors = {"old_logprobs": half, "sampler_logprobs": half, **override}
    return make_terms([0.0] * 6, SIGNS, dtype=dtype, logprobs=logprobs, **anchors)


def test_dppo_tv_by_hand(make_terms, dtype):
    out, grad = gradient(moved_terms(make_terms, dtype), DPPO(delta_low=0.2, delta_high=0.2))
    assert out.clipped_high.tolist() == [True, False, False, False, False, False]
    assert out.clipped_low.tolist() == [False, False, True, False, False, False]
    # Elsewhere the gradient is r A with r = p / .5, and the value that times logp.
    expected = torch.tensor([0.0, 1.2, 0.0, -0.8, 0.4, -1.6], dtype=dtype)
    torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(out.value, expected * torch.tensor(MOVED, dtype=dtype).log())


def test_dppo_weighs_no_token_more_than_the_cap(make_terms, dtype):
    # r = .8 / .01 = 80 with A = -1: kept, since the token moved up, and weighed 20.
    terms = make_terms(
        [0.0],
        -1.0,
        dtype=dtype,
        logprobs=torch.tensor([0.8], dtype=dtype).log().requires_grad_(),
        sampler_logprobs=torch.tensor([0.01], dtype=dtype).log(),
    )
    for cap, weight in ((20.0, 20.0), (100.0, 80.0)):
        _, grad = gradient(terms, DPPO(cap=cap))
        torch.testing.assert_close(grad, torch.tensor([-weight], dtype=dtype))


def test_dppo_kl_by_hand(make_terms, dtype):
    # q = .5: kl = .5 ln(.5/p) + .5 ln(.5/(1-p)) = -.5 ln(4 p (1-p)): .223 at .8 and .2, .0204 at .6 and .4.
    assert -0.5 * math.log(4 * 0.8 * 0.2) == pytest.approx(0.2231, abs=1e-4)
    for delta, cut in ((0.2, True), (0.23, False)):
        out, _ = gradient(moved_terms(make_terms, dtype), DPPO("kl", delta, delta))
        assert out.clipped_high.tolist() == [cut, False, False, False, False, False]
        assert out.clipped_low.tolist() == [False, False, cut, False, False, False]
    out, _ = gradient(moved_terms(make_terms, dtype), DPPO("kl", 0.0203, 0.0203))
    assert out.clipped_high.tolist() == [True, True, False, False, False, False]


def test_dppo_anchor_chooses_whose_ratio(make_terms):
    low = torch.full((6,), 0.1).log()
    _, by_sampler = gradient(moved_terms(make_terms, torch.float32, sampler_logprobs=low), DPPO(delta_high=1.0))
    _, by_old = gradient(
        moved_terms(make_terms, torch.float32, sampler_logprobs=low), DPPO(delta_high=1.0, anchor="old")
    )
    assert by_sampler[1].item() == pytest.approx(6.0)
    assert by_old[1].item() == pytest.approx(1.2)
    assert DPPO().pays_sampler_ratio
    assert not DPPO(anchor="old").pays_sampler_ratio


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_is_finite_where_a_token_is_certain(make_terms, dtype, divergence):
    certain = torch.tensor([0.0, 0.0, -1e-9], dtype=dtype)
    terms = make_terms([0.0] * 3, 1.0, dtype=dtype, logprobs=certain.clone().requires_grad_(), sampler_logprobs=certain)
    out, grad = gradient(terms, DPPO(divergence))
    assert torch.isfinite(out.value).all()
    assert torch.isfinite(grad).all()
    assert not (out.clipped_low | out.clipped_high).any()


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: SAPO(positive=0.0), "`positive` of SAPO"),
        (lambda: SAPO(negative=-1.0), "`negative` of SAPO"),
        (lambda: DPPO(delta_low=-1.0), "`delta_low` of DPPO"),
        (lambda: DPPO(delta_high=float("nan")), "`delta_high` of DPPO"),
        (lambda: DPPO(cap=0.5), "`cap` of DPPO"),
    ],
)
def test_bounds_that_are_none_are_refused(make, key):
    with pytest.raises(ConfigError, match=key):
        make()
