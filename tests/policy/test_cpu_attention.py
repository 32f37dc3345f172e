"""Attention as matrix products: value and gradient are those of the formula, whatever is held at a time."""

import pytest
import torch

from grpo_lit.policy import attention, cpu_attention
from grpo_lit.policy.attention import Branch, Table, make_layout, packed_attention
from grpo_lit.policy.cpu_attention import attend


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Three sequences of 4 queries and 6 keys, 4 query heads on 2 key heads; sizes all differ."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((3, 4, 4, 5), (3, 6, 2, 5), (3, 6, 2, 3))
    )
    seen = torch.arange(6) <= torch.tensor([2, 0, 1])[:, None, None] + torch.arange(4)[:, None]
    return query, key, value, torch.zeros(3, 4, 6, dtype=dtype).masked_fill(~seen, float("-inf"))


def formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    key, value = (part.repeat_interleave(2, dim=2) for part in (key, value))  # query heads 0 and 1 share keys
    scores = scale * torch.einsum("bqad,bwad->baqw", query, key) + bias[:, None]
    return torch.einsum("baqw,bwae->bqae", scores.softmax(-1), value)


@pytest.mark.parametrize("held", [1, 2 * 8 * 6, 2 * 8 * 6 * 2, 2**20], ids=["head", "one", "two", "all"])
def test_value_and_gradient_are_the_formulas(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "SCORES", held)
    *tensors, bias = inputs(torch.float64)
    output, expected = attend(*tensors, bias, 0.3), formula(*tensors, bias, 0.3)
    torch.testing.assert_close(output, expected)
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
    torch.testing.assert_close(
        torch.autograd.grad(output, tensors, weights), torch.autograd.grad(expected, tensors, weights)
    )
    torch.autograd.gradcheck(lambda *parts: attend(*parts, bias, 0.3), tensors)


def test_a_key_that_is_not_seen_has_no_gradient() -> None:
    query, key, value, bias = inputs(torch.bfloat16)
    attend(query, key, value, bias, 0.3).sum().backward()
    assert torch.count_nonzero(key.grad[1, 4:]) == torch.count_nonzero(value.grad[1, 4:]) == 0
    assert torch.count_nonzero(value.grad[1, :4]) == value.grad[1, :4].numel()


def test_bf16_is_about_as_near_the_truth_as_the_fused_kernel() -> None:
    # A pack of one prompt and two completions; heads of 64, where rounded scores matter.
    layout = make_layout([Branch((0, 96), (96, 70)), Branch((0, 96), (166, 60))], 226, masks=True)
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(1, heads, 226, 64, generator=generator, dtype=torch.float64) for heads in (6, 2, 2)]
    module = torch.nn.Module()

    def outcome(dtype: torch.dtype) -> list[torch.Tensor]:
        parts = [part.to(dtype).requires_grad_() for part in exact]
        output, _ = packed_attention(module, *parts, None, layout=layout)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        return [part.double() for part in (output.detach(), *torch.autograd.grad(output, parts, weights))]

    true, ours = outcome(torch.float64), outcome(torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_lit.policy.attention.attend", fused)
        kernel = outcome(torch.bfloat16)
    for a, b, t in zip(ours, kernel, true, strict=True):
        assert 0 < (a - t).norm() < 1.7 * (b - t).norm() < 0.02 * t.norm()


def test_what_all_keys_have_in_common_costs_no_precision() -> None:
    query, key, value, bias = inputs(torch.float64)
    exact = [part.detach().bfloat16() for part in (query + 1.0, key + 16.0, value)]

    def outcome(dtype: torch.dtype) -> list[torch.Tensor]:
        parts = [part.to(dtype).requires_grad_() for part in exact]
        output = attend(*parts, bias.to(dtype), 0.3)
        return [part.double() for part in (output.detach(), *torch.autograd.grad(output.square().sum(), parts))]

    # Scores are about 24, which bf16 tells apart in steps of 0.125.
    for a, t in zip(outcome(torch.bfloat16), outcome(torch.float64), strict=True):
        assert 0 < (a - t).norm() < 0.015 * t.norm()


def test_a_second_derivative_is_refused() -> None:
    query, key, value, bias = inputs(torch.float64)
    (grad,) = torch.autograd.grad(attend(query, key, value, bias, 0.3).square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_sequences_whose_scores_take_too_much_go_to_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_layout([Branch((0, 3), (3, 2)), Branch((0, 3), (5, 1))], 6, masks=True)
    parts = [torch.randn(1, heads, 6, 8, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    whole, _ = packed_attention(torch.nn.Module(), *parts, None, layout=layout)
    kernels: list[torch.Size] = []

    def kernel(query: torch.Tensor, *rest: object) -> torch.Tensor:
        kernels.append(query.shape)
        return original(query, *rest)

    original = attention._fused
    monkeypatch.setattr(attention, "_fused", kernel)
    monkeypatch.setattr(cpu_attention, "MOST", 2 * 3 * 3)  # the prompt's scores for two query heads
    output, _ = packed_attention(torch.nn.Module(), *parts, None, layout=layout)
    assert kernels == [(1, 2, 4, 8)]  # the completion of two tokens, with 2 x 2 x 5 scores
    torch.testing.assert_close(output, whole, atol=0.03, rtol=0.03)


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    output = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias[:, None] == 0, scale=scale, enable_gqa=True
    )
    return output.transpose(1, 2)


def test_the_bias_of_a_table_is_its_mask() -> None:
    keys, queries = torch.arange(5).expand(2, 5), torch.arange(3, 5).expand(2, 2)
    mask = torch.tensor([[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]], dtype=torch.bool)
    assert torch.equal(Table(keys, queries, mask[:, None]).bias == 0, mask)
    assert torch.equal(Table(keys, keys).bias == 0, torch.ones(2, 5, 5, dtype=torch.bool).tril())
