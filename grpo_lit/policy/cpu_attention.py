"""Attention in bf16 on a CPU, as the matrix products it is made of.

SDPA's kernel for CPUs reaches a third of the rate of a matrix product in bf16. Here scores of some sequences at a time
stay in the cache, and query heads that share keys are rows of one product, which adds up their gradients::

    S = scale Q K^T + bias     P = softmax(S)     O = P V
    dV = P^T dO     dS = P (dO V^T - rowsum(dO V^T * P))     dQ = scale dS K     dK = scale dS^T Q

Scores and their gradients are rounded to bf16, as by attention without a fused kernel, and computed again in backward.
What all keys of a sequence have in common adds the same to all scores of a query, which changes no probability but
costs scores their last bits where it is large, as a bias of the keys may be: it is taken off before.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Scores held at a time, where those of one key head are no more: 2 MiB of bf16.
SCORES = 2**20
#: Most scores of one key head [128 MiB of bf16]: longer sequences are for the kernel that holds none.
MOST = 2**26


def attend(
    query: Float[Tensor, "B Q A D"],
    key: Float[Tensor, "B W C D"],
    value: Float[Tensor, "B W C E"],
    bias: Float[Tensor, "B Q W"],
    scale: float,
) -> Float[Tensor, "B Q A E"]:
    """Return softmax(scale Q K^T + bias) V of every head, in the inputs' dtype.

    Args:
        query: Query heads; A / C of them in a row share the keys of one head.
        key: Keys.
        value: Values.
        bias: 0 where a query sees a key, -inf where not, of the same dtype; every query sees one at least.
        scale: Times the products.
    """
    return _Attention.apply(query, key, value, bias, scale)


def fits(query: Float[Tensor, "B Q A D"], key: Float[Tensor, "B W C D"]) -> bool:
    """Return whether the scores of one key head may be held at once."""
    return query.shape[1] * (query.shape[2] // key.shape[2]) * key.shape[1] <= MOST


class _Attention(torch.autograd.Function):
    """Autograd of :func:`attend`; see there."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> Tensor:
        shape, heads = query.shape, key.shape[2]
        query, key, value = _by_head(query, heads) * scale, _by_head(_centred(key), heads), _by_head(value, heads)
        output = value.new_empty(*query.shape[:3], value.shape[3])
        with torch.autocast("cpu", enabled=False):
            for here, probs in _probabilities(query, key, bias):
                torch.bmm(probs, value[here].flatten(0, 1), out=output[here].flatten(0, 1))
        ctx.save_for_backward(query, key, value, bias)
        ctx.scale = scale
        return _by_token(output, shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias = ctx.saved_tensors
        attention_heads, heads = grad.shape[2], key.shape[1]
        grad = _by_head(grad, heads)
        grads = [torch.empty_like(part) for part in (query, key, value)]
        with torch.autocast("cpu", enabled=False):
            for here, probs in _probabilities(query, key, bias):
                q, k, v, g = (part[here].flatten(0, 1) for part in (query, key, value, grad))
                to_query, to_key, to_value = (part[here].flatten(0, 1) for part in grads)
                torch.bmm(probs.transpose(1, 2), g, out=to_value)
                scores = torch._softmax_backward_data(torch.bmm(g, v.transpose(1, 2)), probs, -1, probs.dtype)
                torch.bmm(scores, k, out=to_query)
                torch.bmm(scores.transpose(1, 2), q, out=to_key)
        to_query, to_key, to_value = grads
        # The saved queries are scaled, and with them the gradient of the keys.
        return (
            _by_token(to_query.mul_(ctx.scale), attention_heads),
            _by_token(to_key, heads),
            _by_token(to_value, heads),
            None,
            None,
        )


def _by_head(tokens: Float[Tensor, "B Q A D"], heads: int) -> Float[Tensor, "B C N D"]:
    """Return the rows of each key head together: A / C of them for each token, one token after the other."""
    return tokens.unflatten(2, (heads, -1)).transpose(1, 2).flatten(2, 3).contiguous()


def _by_token(rows: Float[Tensor, "B C N D"], heads: int) -> Float[Tensor, "B Q A D"]:
    """Return what :func:`_by_head` was given."""
    return rows.unflatten(2, (-1, heads // rows.shape[1])).transpose(1, 2).flatten(2, 3)


def _centred(key: Float[Tensor, "B W C D"]) -> Float[Tensor, "B W C D"]:
    """Return keys less their mean; rows of dS add up to 0, so neither dQ nor dK changes."""
    wide = key.to(torch.promote_types(key.dtype, torch.float32))
    return (wide - wide.mean(1, keepdim=True)).to(key.dtype)


def _probabilities(
    query: Float[Tensor, "B C N D"], key: Float[Tensor, "B C W D"], bias: Float[Tensor, "B Q W"]
) -> Iterator[tuple[tuple[slice, slice], Float[Tensor, "n N W"]]]:
    """Yield the probabilities of some sequences at a time, all heads of each, or of some heads of a long one."""
    (sequences, heads, rows, _), (queries, width) = query.shape, bias.shape[1:]
    together = max(1, SCORES // (rows * width))
    step, several = max(1, together // heads), min(together, heads)
    for start, head in product(range(0, sequences, step), range(0, heads, several)):
        here = slice(start, start + step), slice(head, head + several)
        scores = torch.bmm(query[here].flatten(0, 1), key[here].flatten(0, 1).transpose(1, 2))
        grouped = scores.view(-1, min(several, heads - head), queries, rows // queries, width)
        grouped.add_(bias[here[0], None, :, None])
        yield here, torch.softmax(scores, -1)
