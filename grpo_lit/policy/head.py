"""The chunked head: log-prob and entropy of completion tokens from hidden states, never holding [T, V]."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_lit.batch import KeptTensors
from grpo_lit.policy.precision import cast
from grpo_lit.shapes import TokenFloat, TokenInt

#: Bytes of float32 logits held at a time: enough rows to keep the matrix product busy.
CHUNK_BYTES = 64 * 2**20
#: Bytes of float32 logits that a CPU passes over at a time: all passes over a block find it in the cache.
BLOCK_BYTES = 2 * 2**20
#: Rows of the weight whose gradient a CPU adds at a time, for the same reason.
WEIGHT_ROWS = 1024
#: Logit of a token that was not possible: its probability is exactly 0. With -inf, 0 * inf would make entropy NaN.
IMPOSSIBLE = -1e9


@dataclass(frozen=True)
class Head:
    """How logits are made of hidden states, temperature included.

    Attributes:
        weight: Rows of the output embedding.
        bias: Added to the logits, or ``None``.
        temperature: Logits are divided by it.
        scale: Logits are multiplied by it before anything else (Cohere, Granite).
        softcap: logits = softcap * tanh(logits / softcap) where given (Gemma 2).
        entropy_gradient: Whether the entropy carries gradient; without, backward is cheaper.
    """

    weight: Float[Tensor, "V H"]
    bias: Float[Tensor, "V"] | None = None
    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    entropy_gradient: bool = False


def logprobs_and_entropy(
    hidden: Float[Tensor, "T H"], targets: TokenInt, head: Head, kept: KeptTensors | None = None
) -> tuple[TokenFloat, TokenFloat]:
    """Return log p(target) and the entropy of the distribution at each position [nats], in float32 or better.

    z = softcap(scale (h W^T + b)) / temperature,   logp = z[target] - logsumexp(z),   H = logsumexp(z) - sum_v p_v z_v

    With kept tokens, logsumexp and the sum go over those alone: a token that the sampler could not draw has probability
    0 and no gradient. Chunk by chunk, recomputed in backward: peak memory is a chunk of logits, not [T, V].

    Args:
        hidden: Last hidden states at the positions that predict the targets.
        targets: The tokens that were drawn.
        head: The output layer.
        kept: The tokens that were possible at each position, the target among them; ``None``: all.
    """
    return _ChunkedHead.apply(hidden, head.weight, head.bias, targets, head, kept)


def _finished(logits: Tensor, head: Head, impossible: Bool[Tensor, "t V"] | None) -> Tensor:
    """Return logits in float32 or better, scaled, capped and masked: in place where their precision is that already."""
    logits = logits.to(_accumulator(logits.dtype))
    if head.scale != 1.0:
        logits = logits.mul_(head.scale)
    if head.softcap is not None:
        logits = logits.div_(head.softcap).tanh_().mul_(head.softcap)
    if head.temperature != 1.0:
        logits = logits.div_(head.temperature)
    return logits if impossible is None else logits.masked_fill_(impossible, IMPOSSIBLE)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 for a float64 model, whose results are then exact to its precision."""
    return torch.promote_types(dtype, torch.float32)


class _ChunkedHead(torch.autograd.Function):
    """Autograd of :func:`logprobs_and_entropy`; see there."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        head: Head,
        kept: KeptTensors | None,
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        # Autocast would cast the weight again for every chunk: cast once, here, and switch it off below.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        hidden_c, weight_c = hidden.to(dtype), cast(weight, dtype)
        bias_c = None if bias is None else bias.to(dtype)
        logprobs, entropy, lse = (hidden.new_empty(len(targets), dtype=_accumulator(dtype)) for _ in range(3))
        with torch.autocast(device, enabled=False):
            for chunk, impossible, logits in _products(hidden_c, weight_c, bias_c, kept):
                for rows in _blocks(logits):
                    here = slice(chunk.start + rows.start, chunk.start + rows.stop)
                    z = _finished(logits[rows], head, None if impossible is None else impossible[rows])
                    lse[here] = torch.logsumexp(z, -1)
                    logprobs[here] = z.gather(1, targets[here, None])[:, 0] - lse[here]
                    probs = (z - lse[here, None]).exp_()
                    entropy[here] = lse[here] - torch.linalg.vecdot(probs, z)
        ctx.head, ctx.kept, ctx.dtype, ctx.has_bias = head, kept, dtype, bias is not None
        ctx.save_for_backward(hidden, weight, targets, lse, entropy, *([bias] if bias is not None else []))
        if not head.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, entropy, *rest = ctx.saved_tensors
        head, bias = ctx.head, rest[0] if ctx.has_bias else None
        hidden_c, weight_c = hidden.to(ctx.dtype), cast(weight, ctx.dtype)
        bias_c = None if bias is None else bias.to(ctx.dtype)
        grad_hidden = torch.empty_like(hidden_c)
        grad_weight = torch.zeros_like(weight, dtype=_accumulator(ctx.dtype)) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=_accumulator(ctx.dtype)) if bias is not None else None
        for chunk, impossible, logits in _products(hidden_c, weight_c, bias_c, ctx.kept):
            for rows in _blocks(logits):
                here = slice(chunk.start + rows.start, chunk.start + rows.stop)
                z = _finished(logits[rows], head, None if impossible is None else impossible[rows])
                logits[rows] = _gradient(
                    z, targets[here], lse[here], entropy[here], (grad_logprobs[here], grad_entropy[here]), head
                )
            grad_hidden[chunk] = logits @ weight_c
            if grad_weight is not None:
                _accumulate(grad_weight, logits, hidden_c[chunk])
            if grad_bias is not None:
                grad_bias += logits.sum(0, dtype=grad_bias.dtype)
        return (
            grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _gradient(
    z: Tensor, targets: Tensor, lse: Tensor, entropy: Tensor, grads: tuple[Tensor, Tensor], head: Head
) -> Tensor:
    """Return the gradient with respect to the products of :func:`_products`.

    dlogp/dz = onehot - p;  dH/dz = -p (log p + H)
    """
    of_logprobs, of_entropy = grads
    log_p = z - lse[:, None]
    grad = log_p.exp()
    if head.entropy_gradient:
        grad *= -of_logprobs[:, None] - of_entropy[:, None] * log_p.add_(entropy[:, None])
    else:
        grad *= -of_logprobs[:, None]
    grad.scatter_add_(1, targets[:, None], of_logprobs[:, None])
    if head.softcap is not None:
        grad *= 1 - (z * (head.temperature / head.softcap)) ** 2
    if head.scale != head.temperature:
        grad *= head.scale / head.temperature
    return grad


def _accumulate(total: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """Add grad^T hidden to ``total`` [V H] in its precision."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.T, hidden)
        return
    rows = WEIGHT_ROWS if total.device.type == "cpu" else len(total)
    for part, columns in zip(total.split(rows), grad.split(rows, 1), strict=True):
        part += columns.T @ hidden


def _products(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, kept: KeptTensors | None
) -> Iterator[tuple[slice, Bool[Tensor, "t V"] | None, Float[Tensor, "t V"]]]:
    """Yield h W^T + b of each chunk, in memory that the next chunk takes over, and what was impossible in it."""
    # Of one size whatever is asked: an allocator would find no room for the next micro-batch's, if that is larger by a
    # token. What is not touched takes no memory.
    buffer = hidden.new_empty(max(CHUNK_BYTES // 4, len(weight)))
    for chunk, impossible in _chunks(len(hidden), len(weight), kept):
        part = hidden[chunk]
        logits = torch.mm(part, weight.T, out=buffer[: len(part) * len(weight)].view(len(part), len(weight)))
        yield chunk, impossible, logits if bias is None else logits.add_(bias)


def _blocks(logits: Float[Tensor, "t V"]) -> list[slice]:
    """Return rows that a CPU keeps in its cache; on another device all of them, which launches least."""
    rows, vocabulary = logits.shape
    size = max(1, BLOCK_BYTES // (4 * vocabulary)) if logits.device.type == "cpu" else rows
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _chunks(
    tokens: int, vocabulary: int, kept: KeptTensors | None
) -> Iterator[tuple[slice, Bool[Tensor, "t V"] | None]]:
    """Yield where each chunk lies, and which tokens were impossible in it; ``None``: none."""
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    slices = [slice(start, start + size) for start in range(0, tokens, size)]
    if kept is None:
        yield from ((chunk, None) for chunk in slices)
        return
    counts = [kept.counts[chunk] for chunk in slices]
    # All sizes at once: reading them one by one would stop a CUDA device at every chunk.
    sizes = torch.stack([part.sum() for part in counts]).tolist() if counts else []
    for chunk, part, ids in zip(slices, counts, kept.ids.split(sizes), strict=True):
        yield chunk, _impossible(part, ids, vocabulary)


def _impossible(counts: Int[Tensor, "t"], ids: Int[Tensor, "E"], vocabulary: int) -> Bool[Tensor, "t V"]:
    """Return which tokens are not among ``ids``, of which each row has as many as ``counts`` says; 0: none."""
    impossible = (counts > 0)[:, None].repeat(1, vocabulary)
    rows = torch.repeat_interleave(torch.arange(len(counts), device=ids.device), counts, output_size=len(ids))
    return impossible.index_put_((rows, ids.long()), impossible.new_zeros(()))
