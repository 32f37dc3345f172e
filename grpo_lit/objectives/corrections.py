"""Was the sampler someone else? Corrections: detached factors for the gap between engine and learner."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from grpo_lit.errors import ConfigError
from grpo_lit.objectives.terms import Terms, bounded
from grpo_lit.shapes import TokenBool, TokenFloat


@dataclass(frozen=True)
class CorrectionOutput:
    """A factor per token, and where it was cut.

    Attributes:
        weight: Detached factor of the surrogate.
        cut: The factor differs from the plain importance ratio.
    """

    weight: TokenFloat
    cut: TokenBool


class Correction(ABC):
    """A detached factor per token; several multiply."""

    @abstractmethod
    def __call__(self, terms: Terms) -> CorrectionOutput:
        """Return the factor of every token of the micro-batch."""


@dataclass
class TruncatedIS(Correction):
    """Token-level truncated importance sampling (TIS) of the engine's policy.

    c = min(exp(logp_old - logp_sampler), cap)

    Source: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).

    Args:
        cap: Largest factor.
    """

    cap: float = 2.0

    def __post_init__(self) -> None:
        """Refuse a cap that would cut an on-policy token."""
        if self.cap < 1:
            raise ConfigError(f"`cap` of TruncatedIS expected to be >= 1, but got {self.cap}")

    def __call__(self, terms: Terms) -> CorrectionOutput:
        """Return the factor; see the class."""
        ratio = bounded(terms.old_logprobs - terms.sampler_logprobs).exp().detach()
        return CorrectionOutput(weight=ratio.clamp(max=self.cap), cut=ratio > self.cap)
