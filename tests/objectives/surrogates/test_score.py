import math

import pytest
import torch

from grpo_lit.errors import ConfigError
from grpo_lit.objectives import CISPO, PolicyGradient


def gradient(terms, part):
    out = part(terms)
    (grad,) = torch.autograd.grad(out.value.sum(), terms.logprobs)
    return out, grad


def test_policy_gradient_by_hand(make_terms, dtype):
    # logp = -1 + d: values A (d - 1), gradient A whatever the ratio.
    out, grad = gradient(make_terms([0.5, -2.0], [2.0, -1.0], dtype=dtype), PolicyGradient())
    torch.testing.assert_close(out.value, torch.tensor([-1.0, 3.0], dtype=dtype))
    assert grad.tolist() == [2.0, -1.0]
    assert not (out.clipped_low | out.clipped_high).any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.1), (1.0, 1.0), (1.5, 1.28), (10.0, 1.28)])
def test_cispo_weighs_every_token_and_never_differentiates_the_ratio(make_terms, dtype, advantage, ratio, weight):
    # Field bug A8.
    # Cap 1 + .28. d f / d logp = sg(clip(r)) A: 1.28 A at r = 1.5, where PPO would have nothing for A > 0.
    terms = make_terms([math.log(ratio)], [advantage], dtype=dtype)
    out, grad = gradient(terms, CISPO(high=0.28))
    torch.testing.assert_close(grad, torch.tensor([weight * advantage], dtype=dtype))
    torch.testing.assert_close(out.value, weight * advantage * terms.logprobs)
    assert out.clipped_high.item() is (ratio > 1.28)


def test_cispo_lower_bound(make_terms):
    # low .3: the weight of r = .1 rises to .7.
    out, grad = gradient(make_terms([math.log(0.1)], [1.0]), CISPO(low=0.3))
    assert grad.item() == pytest.approx(0.7)
    assert out.clipped_low.item()


def test_cispo_cap_of_scale_rl_is_five():
    assert CISPO().high + 1 == 5


@pytest.mark.parametrize("key", ["low", "high"])
def test_bounds_that_are_none_are_refused(key):
    with pytest.raises(ConfigError, match=f"`{key}` of CISPO"):
        CISPO(**{key: -0.1})
