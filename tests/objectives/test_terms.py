import math

import pytest
import torch

from grpo_lit.objectives.terms import MAX_LOG_RATIO, Terms, bounded, no_tokens, tangent_exp


def test_tangent_exp_is_exp_below_and_a_line_above(dtype):
    # f(2) = e^2. f(23) = e^20 (1 + 23 - 20) = 4 e^20, slope e^20 everywhere beyond 20.
    x = torch.tensor([-100.0, 2.0, 20.0, 23.0, 100.0], dtype=dtype, requires_grad=True)
    y = tangent_exp(x)
    e20 = math.exp(20)
    expected = torch.tensor([math.exp(-100), math.exp(2), e20, 4 * e20, 81 * e20], dtype=dtype)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([math.exp(-100), math.exp(2), e20, e20, e20], dtype=dtype))


def test_tangent_exp_has_no_step_at_the_seam():
    x = torch.tensor([MAX_LOG_RATIO - 1e-9, MAX_LOG_RATIO + 1e-9], dtype=torch.float64)
    below, above = tangent_exp(x)
    assert above > below
    assert (above - below) / below == pytest.approx(2e-9, rel=1e-3)


def test_tangent_exp_passes_the_second_order_gradient_check():
    x = torch.tensor([-3.0, 0.0, 1.5, 19.0, 22.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(tangent_exp, x)


def test_bounded_squares_within_float32():
    ratio = bounded(torch.tensor([-1e4, 1e4])).exp()
    assert torch.isfinite(ratio**2).all()
    assert (ratio**2 > 0).all()


def test_sequence_sums_and_means_know_empty_sequences(make_terms):
    # Tokens 1 2 | (none) | 3 4 5: sums 3 0 12, means 1.5 0 4.
    terms = make_terms([0.0] * 5, 0.0, lengths=[2, 0, 3])
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert terms.sequence_sum(values).tolist() == [3.0, 0.0, 12.0]
    assert terms.sequence_mean(values).tolist() == [1.5, 0.0, 4.0]
    assert terms.spread(torch.tensor([7.0, 8.0, 9.0])).tolist() == [7.0, 7.0, 9.0, 9.0, 9.0]


def test_without_old_logprobs_the_policy_is_its_own_old_policy(make_batch):
    batch = make_batch([1.0, 0.0], lengths=[1, 2], advantages=torch.tensor([1.0, -1.0]))
    logprobs = torch.tensor([-0.5, -1.5, -2.5], requires_grad=True)
    terms = Terms.of(batch, logprobs, torch.zeros(3))
    assert terms.ratio.tolist() == [1.0, 1.0, 1.0]
    assert not terms.old_logprobs.requires_grad
    assert terms.advantages.tolist() == [1.0, -1.0, -1.0]


def test_terms_ask_for_advantages(make_batch):
    with pytest.raises(ValueError, match="advantages"):
        Terms.of(make_batch([1.0]), torch.zeros(1), torch.zeros(1))


def test_no_tokens_flags_none():
    assert no_tokens(torch.ones(3)).tolist() == [False, False, False]
