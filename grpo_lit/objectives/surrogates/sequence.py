"""Surrogates whose ratio belongs to the whole sequence."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from grpo_lit.objectives.surrogates.base import Surrogate, SurrogateOutput, ppo_clip, refuse_negative
from grpo_lit.objectives.terms import Terms, tangent_exp


@dataclass
class SequenceClip(Surrogate):
    """GSPO: one clipped ratio per sequence, which each of its tokens carries.

    f = min(s A, clip(s, 1 - low, 1 + high) A)      s = exp(mean_t d), or exp(sum_t d) with ``ratio: product``

    At s = 1 the geometric form has the gradient of plain policy gradient, A per token under its weight; the product
    form has length times that, since every token's value holds the sum.

    Paper: GSPO (arXiv 2507.18071).

    Args:
        low: How far below 1 the ratio still earns when A < 0.
        high: How far above 1 the ratio still earns when A > 0.
        ratio: ``geometric`` takes the mean of the log-ratio (GSPO); ``product`` the sum, the plain likelihood ratio,
            whose bounds must be wider.
    """

    low: float = 3e-4
    high: float = 4e-4
    ratio: Literal["geometric", "product"] = "geometric"

    level: ClassVar[Literal["token", "sequence"]] = "sequence"

    def __post_init__(self) -> None:
        """Refuse bounds that are no bounds."""
        refuse_negative(self, low=self.low, high=self.high)

    def __call__(self, terms: Terms) -> SurrogateOutput:
        """Return the value; see the class."""
        reduce = terms.sequence_mean if self.ratio == "geometric" else terms.sequence_sum
        ratio = terms.spread(tangent_exp(reduce(terms.log_ratio)))
        return ppo_clip(ratio, terms.advantages, self.low, self.high)


@dataclass
class SequenceTokenClip(Surrogate):
    """GSPO-token: the sequence's clipped ratio, whose gradient stays with each token.

    f = min(s_t A, clip(s_t, 1 - low, 1 + high) A)      s_t = sg(s) p_t / sg(p_t)      s = exp(mean_t d)

    With one advantage per sequence, value and gradient are those of :class:`SequenceClip`; the gradient of a token no
    longer depends on the others' values, so single tokens may be left out.

    Paper: GSPO (arXiv 2507.18071), section 4.3.

    Args:
        low: How far below 1 the ratio still earns when A < 0.
        high: How far above 1 the ratio still earns when A > 0.
    """

    low: float = 3e-4
    high: float = 4e-4

    def __post_init__(self) -> None:
        """Refuse bounds that are no bounds."""
        refuse_negative(self, low=self.low, high=self.high)

    def __call__(self, terms: Terms) -> SurrogateOutput:
        """Return the value; see the class."""
        sequence_ratio = terms.spread(tangent_exp(terms.sequence_mean(terms.log_ratio.detach())))
        own_gradient = (terms.logprobs - terms.logprobs.detach()).exp()
        return ppo_clip(sequence_ratio * own_gradient, terms.advantages, self.low, self.high)


@dataclass
class GeometricMean(Surrogate):
    """GMPO: geometric mean of token ratios, each clipped on the side its advantage pushes to.

    f = exp(mean_t d'_t) A      d' = min(d, high) where A > 0, max(d, -low) where A < 0

    The clip is on the log-ratio, so the ratio lies below e^high or above e^-low; every token of a sequence carries the
    sequence's value. Paper: GMPO (arXiv 2507.20673).

    Args:
        low: Largest fall of the log-ratio that still counts when A < 0 [nats].
        high: Largest rise of the log-ratio that still counts when A > 0 [nats].
    """

    low: float = 0.4
    high: float = 0.4

    level: ClassVar[Literal["token", "sequence"]] = "sequence"

    def __post_init__(self) -> None:
        """Refuse bounds that are no bounds."""
        refuse_negative(self, low=self.low, high=self.high)

    def __call__(self, terms: Terms) -> SurrogateOutput:
        """Return the value; see the class."""
        d, advantages = terms.log_ratio, terms.advantages
        one_sided = torch.where(advantages > 0, d.clamp(max=self.high), d.clamp(min=-self.low))
        ratio = terms.spread(tangent_exp(terms.sequence_mean(one_sided)))
        return SurrogateOutput(
            value=ratio * advantages,
            clipped_low=(d < -self.low) & (advantages < 0),
            clipped_high=(d > self.high) & (advantages > 0),
        )
