"""What every part of the objective may look at, and the segment arithmetic they share."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_lit.batch import TokenBatch
from grpo_lit.shapes import SequenceFloat, SequenceInt, TokenBool, TokenFloat, TokenInt

#: exp(20) = 4.9e8 still squares within float32; beyond it ratios and k3 overflow to inf and their gradients to NaN.
#: The bound comes before exp: bounding the value afterwards leaves inf * 0 = NaN in the gradient.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Terms:
    """Per-token terms of the sequences of one micro-batch; whole sequences only.

    Half-precision log-probs are widened to float32: float16 overflows at exp(12).

    Attributes:
        logprobs: Log-probs under the policy being trained, with gradient.
        old_logprobs: Log-probs under the old policy, detached.
        sampler_logprobs: The engine's log-probs.
        reference_logprobs: Log-probs under the reference, or ``None``.
        entropy: Entropy of the policy at each position [nats].
        advantages: Advantage of each token's sequence.
        lengths: Tokens of each sequence.
        sequence: Sequence of each token.
        domain: Index into ``domains`` of each sequence.
        domains: Names of the domains.
    """

    logprobs: TokenFloat
    old_logprobs: TokenFloat
    sampler_logprobs: TokenFloat
    reference_logprobs: TokenFloat | None
    entropy: TokenFloat
    advantages: TokenFloat
    lengths: SequenceInt
    sequence: TokenInt
    domain: SequenceInt
    domains: tuple[str, ...] = ("default",)

    @classmethod
    def of(cls, batch: TokenBatch, logprobs: TokenFloat, entropy: TokenFloat) -> "Terms":
        """Join a batch with the output of the policy, which is its own old policy where nothing older is known."""
        if batch.advantages is None:
            raise ValueError("`batch.advantages` expected a value per sequence, but got None: compute them first")
        sequence, logprobs = batch.sequence, _widened(logprobs)
        return cls(
            logprobs=logprobs,
            old_logprobs=_old_logprobs(batch, logprobs.detach()),
            sampler_logprobs=_widened(batch.sampler_logprobs),
            reference_logprobs=None if batch.reference_logprobs is None else _widened(batch.reference_logprobs),
            entropy=_widened(entropy),
            advantages=batch.advantages[sequence],
            lengths=batch.lengths,
            sequence=sequence,
            domain=batch.domain,
            domains=batch.domains,
        )

    @cached_property
    def log_ratio(self) -> TokenFloat:
        """d = logp - logp_old, as it is; exponentiate it with :func:`tangent_exp` only."""
        return self.logprobs - self.old_logprobs

    @cached_property
    def ratio(self) -> TokenFloat:
        """r = exp(d), continued by its tangent beyond ``MAX_LOG_RATIO``."""
        return tangent_exp(self.log_ratio)

    def sequence_sum(self, values: TokenFloat) -> SequenceFloat:
        """Sum over the tokens of each sequence; 0 for an empty one."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.sequence, values)

    def sequence_mean(self, values: TokenFloat) -> SequenceFloat:
        """Mean over the tokens of each sequence; 0 for an empty one."""
        return self.sequence_sum(values) / self.lengths.clamp(min=1)

    def spread(self, values: SequenceFloat) -> TokenFloat:
        """Give every token its sequence's value."""
        return values[self.sequence]


def tangent_exp(x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """exp up to ``MAX_LOG_RATIO``, and its tangent there beyond it.

    f(x) = exp(min(x, 20)) (1 + x - min(x, 20))

    Finite in value and gradient for any finite x, monotone, and smooth. A plain clamp has gradient 0 beyond the bound,
    so the tokens that moved furthest from the reference would be the only ones that the KL lets go.
    """
    top = x.clamp(max=MAX_LOG_RATIO)
    return top.exp() * (1 + x - top)


def bounded(log_ratio: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """Clamp a log-ratio that carries no gradient (a correction, a metric) so that its exponential squares finitely."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _old_logprobs(batch: TokenBatch, own: TokenFloat) -> TokenFloat:
    if batch.old_logprobs is None:
        return own
    old = _widened(batch.old_logprobs)
    return old if batch.own is None else torch.where(batch.own[batch.sequence], own, old)


def _widened(values: TokenFloat) -> TokenFloat:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def no_tokens(values: TokenFloat) -> TokenBool:
    """Return an all-false flag per token."""
    return torch.zeros_like(values, dtype=torch.bool)
