import math

import pytest
import torch

from grpo_lit.errors import ConfigError
from grpo_lit.objectives import CappedRatio, TokenClip


def gradient(terms, part):
    out = part(terms)
    (grad,) = torch.autograd.grad(out.value.sum(), terms.logprobs)
    return out, grad


def test_token_clip_by_hand(make_terms, dtype):
    # Ratios 1.5 1.5 0.5 0.5 1.1 with A = 2 -2 2 -2 2, low .2, high .3:
    #   1.5, +: min(3, 2.6) = 2.6, cut. 1.5, -: min(-3, -2.6) = -3, dr A = -3. 0.5, +: min(1, 1.6) = 1, gradient 1.
    #   0.5, -: min(-1, -1.6) = -1.6, cut. 1.1, +: inside, 2.2. The gradient to logp of r A is r A.
    ratio = [1.5, 1.5, 0.5, 0.5, 1.1]
    terms = make_terms([math.log(r) for r in ratio], [2.0, -2.0, 2.0, -2.0, 2.0], dtype=dtype)
    out, grad = gradient(terms, TokenClip(0.2, 0.3))
    torch.testing.assert_close(out.value, torch.tensor([2.6, -3.0, 1.0, -1.6, 2.2], dtype=dtype))
    torch.testing.assert_close(grad, torch.tensor([0.0, -3.0, 1.0, 0.0, 2.2], dtype=dtype))
    assert out.clipped_high.tolist() == [True, False, False, False, False]
    assert out.clipped_low.tolist() == [False, False, False, True, False]


def test_token_clip_has_the_policy_gradient_at_ratio_one_whatever_the_bounds(make_terms, dtype):
    # At r = 1 both sides of the min are equal and d(rA)/dlogp = A, also where the bounds are 0.
    for bounds in ((0.2, 0.2), (0.0, 0.0), (10.0, 10.0)):
        _, grad = gradient(make_terms([0.0, 0.0], [1.5, -0.5], dtype=dtype), TokenClip(*bounds))
        assert grad.tolist() == [1.5, -0.5]


def test_dual_clip_bounds_the_punishment(make_terms, dtype):
    # A = -1, r = 5: PPO gives -5 with gradient -5; with dual 3 it is -3 and cut. r = 2 is inside: -2. A = +1: as ever.
    terms = make_terms([math.log(5), math.log(2), math.log(5)], [-1.0, -1.0, 1.0], dtype=dtype)
    out, grad = gradient(terms, TokenClip(0.2, 0.2, dual=3.0))
    torch.testing.assert_close(out.value, torch.tensor([-3.0, -2.0, 1.2], dtype=dtype))
    torch.testing.assert_close(grad, torch.tensor([0.0, -2.0, 0.0], dtype=dtype))
    assert out.clipped_high.tolist() == [True, False, True]


def test_a_punished_token_far_above_the_old_policy_keeps_its_gradient(make_terms, dtype):
    # A = -1, d = 100: the formula's gradient is -e^100; ours is the largest that is sound, -e^20, and not 0.
    _, grad = gradient(make_terms([100.0, -100.0], [-1.0, -1.0], dtype=dtype), TokenClip())
    torch.testing.assert_close(grad, torch.tensor([-math.exp(20), 0.0], dtype=dtype))


def test_capped_ratio_by_hand(make_terms, dtype):
    # Cap 2: r = 3 is cut for either sign of A, r = .5 is not.
    terms = make_terms([math.log(3), math.log(3), math.log(0.5)], [1.0, -1.0, 1.0], dtype=dtype)
    out, grad = gradient(terms, CappedRatio(1.0))
    torch.testing.assert_close(out.value, torch.tensor([2.0, -2.0, 0.5], dtype=dtype))
    torch.testing.assert_close(grad, torch.tensor([0.0, 0.0, 0.5], dtype=dtype))
    assert out.clipped_high.tolist() == [True, True, False]
    assert not out.clipped_low.any()


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: TokenClip(low=-0.1), "`low` of TokenClip"),
        (lambda: TokenClip(high=float("nan")), "`high` of TokenClip"),
        (lambda: TokenClip(dual=1.0), "`dual` of TokenClip"),
        (lambda: CappedRatio(-1.0), "`high` of CappedRatio"),
    ],
)
def test_bounds_that_are_none_are_refused(make, key):
    with pytest.raises(ConfigError, match=key):
        make()
