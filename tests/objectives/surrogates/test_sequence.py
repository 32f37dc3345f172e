import math

import pytest
import torch

from grpo_lit.errors import ConfigError
from grpo_lit.objectives import GeometricMean, SequenceClip, SequenceTokenClip


def gradient(terms, part):
    out = part(terms)
    (grad,) = torch.autograd.grad(out.value.sum(), terms.logprobs)
    return out, grad


def test_gspo_by_hand(make_terms, dtype):
    # Log-ratios .1 .3 | -.2 with A = 2 | -1: s = e^.2 | e^-.2. Bounds far away: every token has s A, and the gradient
    # to a token is sum over the len tokens of A s / len = A s.
    terms = make_terms([0.1, 0.3, -0.2], [2.0, -1.0], lengths=[2, 1], dtype=dtype)
    out, grad = gradient(terms, SequenceClip(9.0, 9.0))
    s, u = math.exp(0.2), math.exp(-0.2)
    torch.testing.assert_close(out.value, torch.tensor([2 * s, 2 * s, -u], dtype=dtype))
    torch.testing.assert_close(grad, torch.tensor([2 * s, 2 * s, -u], dtype=dtype))


def test_the_product_form_is_the_likelihood_ratio(make_terms, dtype):
    # s = e^(.1 + .3); each of 2 tokens carries s A, whose gradient to either log-prob is s A: 2 s A in all.
    terms = make_terms([0.1, 0.3], [2.0], lengths=[2], dtype=dtype)
    out, grad = gradient(terms, SequenceClip(9.0, 9.0, ratio="product"))
    s = math.exp(0.4)
    torch.testing.assert_close(out.value, torch.tensor([2 * s, 2 * s], dtype=dtype))
    torch.testing.assert_close(grad, torch.tensor([4 * s, 4 * s], dtype=dtype))


def test_gspo_clips_whole_sequences(make_terms, dtype):
    # Means .0005 | .0005 | -.0005 with A = 1 | -1 | -1 and bounds 3e-4 / 4e-4: the first leaves above, the third below.
    terms = make_terms([0.001, 0.0, 0.001, 0.0, -0.001, 0.0], [1.0, -1.0, -1.0], lengths=[2, 2, 2], dtype=dtype)
    out, grad = gradient(terms, SequenceClip())
    assert out.clipped_high.tolist() == [True, True, False, False, False, False]
    assert out.clipped_low.tolist() == [False, False, False, False, True, True]
    torch.testing.assert_close(out.value[:2], torch.full((2,), 1.0004, dtype=dtype))
    torch.testing.assert_close(out.value[4:], torch.full((2,), -0.9997, dtype=dtype))
    assert grad[:2].tolist() == [0.0, 0.0] == grad[4:].tolist()
    torch.testing.assert_close(grad[2:4], torch.full((2,), -math.exp(0.0005), dtype=dtype))


def test_gspo_token_equals_gspo_in_value_and_gradient(make_terms, dtype):
    # The paper's claim for one advantage per sequence: sum over tokens of A s / len (GSPO) against A s once.
    d, advantages, lengths = [0.1, 0.3, -0.2, 0.05, 0.0, -0.4], [2.0, -1.0], [2, 4]
    for low, high in ((9.0, 9.0), (0.1, 0.1)):
        gspo, gspo_grad = gradient(make_terms(d, advantages, lengths, dtype), SequenceClip(low, high))
        token, token_grad = gradient(make_terms(d, advantages, lengths, dtype), SequenceTokenClip(low, high))
        torch.testing.assert_close(token.value, gspo.value)
        torch.testing.assert_close(token_grad, gspo_grad)
        assert token.clipped_low.tolist() == gspo.clipped_low.tolist()


def test_gspo_token_keeps_gradients_apart_and_gspo_does_not(make_terms):
    for part, expected in ((SequenceTokenClip(9.0, 9.0), False), (SequenceClip(9.0, 9.0), True)):
        terms = make_terms([0.1, 0.3], [1.0], lengths=[2])
        (grad,) = torch.autograd.grad(part(terms).value[0], terms.logprobs)
        assert bool(grad[1] != 0) is expected
        assert part.level == ("sequence" if expected else "token")


def test_equal_weight_per_sequence_however_long(make_terms):
    # Field bug A7.
    # Lengths 1 and 4, A = 1 and -1, ratio 1, w = 1 / (2 len): the loss is 0. A [2, 1] value broadcast over [2, 4]
    # tokens and averaged gave .6.
    terms = make_terms([0.0] * 5, [1.0, -1.0], lengths=[1, 4])
    weights = terms.spread(1 / (2 * terms.lengths.float()))
    for part in (SequenceClip(), SequenceTokenClip(), GeometricMean()):
        assert (weights * part(terms).value).sum().item() == pytest.approx(0.0, abs=1e-7)


def test_gmpo_by_hand(make_terms, dtype):
    # A = 2, d = .6 -.9, bounds .4: d' = .4 -.9, mean -.25; the first token is cut, the second has 1/2 of 2 tokens'
    # value: gradient A s. A = -1, d = .9 -.6: d' = .9 -.4, mean .25; now the second is cut.
    terms = make_terms([0.6, -0.9, 0.9, -0.6], [2.0, -1.0], lengths=[2, 2], dtype=dtype)
    out, grad = gradient(terms, GeometricMean(0.4, 0.4))
    s, u = math.exp(-0.25), math.exp(0.25)
    torch.testing.assert_close(out.value, torch.tensor([2 * s, 2 * s, -u, -u], dtype=dtype))
    torch.testing.assert_close(grad, torch.tensor([0.0, 2 * s, -u, 0.0], dtype=dtype))
    assert out.clipped_high.tolist() == [True, False, False, False]
    assert out.clipped_low.tolist() == [False, False, False, True]


def test_gmpo_with_no_advantage_has_no_value(make_terms):
    out, grad = gradient(make_terms([0.6, -50.0], [0.0], lengths=[2]), GeometricMean())
    assert out.value.tolist() == [0.0, 0.0]
    assert grad.tolist() == [0.0, 0.0]
    assert not (out.clipped_low | out.clipped_high).any()


@pytest.mark.parametrize("part", [SequenceClip(), SequenceClip(ratio="product"), SequenceTokenClip(), GeometricMean()])
def test_sequences_do_not_touch_each_other_and_may_be_empty(make_terms, part):
    # Field bug A7: there is no padded token, and no other sequence's token moves a ratio.
    terms = make_terms([0.01, 0.02, -0.5], [1.0, 1.0, -1.0], lengths=[2, 0, 1])
    (grad,) = torch.autograd.grad(part(terms).value[:2].sum(), terms.logprobs)
    assert grad[2] == 0


@pytest.mark.parametrize("make", [SequenceClip, SequenceTokenClip, GeometricMean])
@pytest.mark.parametrize("key", ["low", "high"])
def test_bounds_that_are_none_are_refused(make, key):
    with pytest.raises(ConfigError, match=f"`{key}` of {make.__name__}"):
        make(**{key: -1.0})
