"""Surrogates that bound the ratio token by token."""

from dataclasses import dataclass

import torch

from grpo_lit.errors import ConfigError
from grpo_lit.objectives.surrogates.base import Surrogate, SurrogateOutput, ppo_clip, refuse_negative
from grpo_lit.objectives.terms import Terms, no_tokens


@dataclass
class TokenClip(Surrogate):
    """PPO's clipped ratio, token by token.

    f = min(r A, clip(r, 1 - low, 1 + high) A)      r = exp(d)      and with ``dual``, for A < 0: max(f, dual A)

    Papers: PPO (arXiv 1707.06347); low and high apart ("clip-higher"): DAPO (arXiv 2503.14476); dual clip: Ye et al.
    (arXiv 1912.09729), as ``delta`` in INTELLECT-2 (arXiv 2505.07291).

    Args:
        low: How far below 1 the ratio still earns when A < 0; 1 or more is no bound.
        high: How far above 1 the ratio still earns when A > 0.
        dual: Largest ratio that counts when A < 0, where PPO has no bound; ``null``: none.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        """Refuse bounds that are no bounds."""
        refuse_negative(self, low=self.low, high=self.high)
        if self.dual is not None and not self.dual > 1:
            raise ConfigError(f"`dual` of TokenClip expected to be > 1, but got {self.dual}: it bounds the ratio above")

    def __call__(self, terms: Terms) -> SurrogateOutput:
        """Return the value; see the class."""
        out = ppo_clip(terms.ratio, terms.advantages, self.low, self.high)
        if self.dual is None:
            return out
        held = (terms.ratio > self.dual) & (terms.advantages < 0)
        value = torch.where(held, self.dual * terms.advantages, out.value)
        return SurrogateOutput(value, out.clipped_low, out.clipped_high | held)


@dataclass
class CappedRatio(Surrogate):
    """The ratio, truncated above whatever the sign of the advantage.

    f = min(r, 1 + high) A      r = exp(d)

    A token beyond the cap has no gradient. Paper: E. Ionides, "Truncated importance sampling" (2008).

    Args:
        high: How far above 1 the ratio counts.
    """

    high: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a cap below an on-policy ratio."""
        refuse_negative(self, high=self.high)

    def __call__(self, terms: Terms) -> SurrogateOutput:
        """Return the value; see the class."""
        capped = terms.ratio.clamp(max=1 + self.high)
        return SurrogateOutput(capped * terms.advantages, no_tokens(capped), terms.ratio > 1 + self.high)
