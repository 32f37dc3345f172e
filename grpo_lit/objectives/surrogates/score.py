"""Surrogates whose gradient is a detached factor times that of the log-prob."""

from dataclasses import dataclass

from grpo_lit.objectives.surrogates.base import Surrogate, SurrogateOutput, refuse_negative
from grpo_lit.objectives.terms import Terms, no_tokens


@dataclass
class PolicyGradient(Surrogate):
    """Plain policy gradient: f = A logp.

    It knows no old policy: use it with one update per rollout, or with a correction.
    Paper: REINFORCE (R. Williams, 1992).
    """

    def __call__(self, terms: Terms) -> SurrogateOutput:
        """Return the value; see the class."""
        value = terms.advantages * terms.logprobs
        return SurrogateOutput(value, no_tokens(value), no_tokens(value))


@dataclass
class CISPO(Surrogate):
    """Policy gradient under a clipped, detached importance weight: no token loses its gradient.

    f = sg(clip(r, 1 - low, 1 + high)) A logp      r = exp(d)

    The cap is 1 + ``high``; some other codes take the bound itself. Paper: CISPO in MiniMax-M1 (arXiv 2506.13585),
    which leaves the lower side open and does not print ``high``; the default is the cap of 5 in ScaleRL
    (arXiv 2510.13786).

    Args:
        low: How far below 1 the weight may fall; 1 is no bound.
        high: How far above 1 the weight may rise.
    """

    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        """Refuse bounds that are no bounds."""
        refuse_negative(self, low=self.low, high=self.high)

    def __call__(self, terms: Terms) -> SurrogateOutput:
        """Return the value; see the class."""
        ratio = terms.ratio.detach()
        weight = ratio.clamp(1 - self.low, 1 + self.high)
        value = weight * terms.advantages * terms.logprobs
        return SurrogateOutput(value, ratio < 1 - self.low, ratio > 1 + self.high)
