"""What holds the policy near the reference? Divergences: the per-token penalty k."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from grpo_lit.errors import ConfigError
from grpo_lit.objectives.terms import Terms, bounded
from grpo_lit.shapes import TokenFloat


@dataclass
class Divergence(ABC):
    """Per-token estimate of KL(policy || reference), times ``beta`` in the loss.

    Args:
        beta: Coefficient. 0 pays nothing, and no reference model is held.
    """

    beta: float = 0.04

    def __post_init__(self) -> None:
        """Refuse a coefficient that would push the policy away."""
        if self.beta < 0:
            raise ConfigError(f"`beta` of {type(self).__name__} expected to be >= 0, but got {self.beta}")

    @abstractmethod
    def __call__(self, terms: Terms) -> TokenFloat:
        """Return k of every token, without ``beta``."""


@dataclass
class K3(Divergence):
    """The low-variance, never negative estimate.

    k3 = exp(q) - q - 1      q = logp_reference - logp

    Source: J. Schulman, "Approximating KL divergence" (2020); in the loss: GRPO (arXiv 2402.03300).
    """

    def __call__(self, terms: Terms) -> TokenFloat:
        """Return k3 of every token."""
        q = bounded(terms.reference_logprobs - terms.logprobs)
        return q.exp() - q - 1
