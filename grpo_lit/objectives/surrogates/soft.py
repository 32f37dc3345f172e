"""Surrogates with a trust region other than a clip of the ratio: SAPO and DPPO."""

from dataclasses import dataclass
from typing import Literal

import torch

from grpo_lit.errors import ConfigError
from grpo_lit.objectives.surrogates.base import Surrogate, SurrogateOutput, refuse_negative
from grpo_lit.objectives.terms import Terms, no_tokens, tangent_exp
from grpo_lit.shapes import TokenFloat


@dataclass
class SAPO(Surrogate):
    """Soft adaptive policy optimization: a sigmoid gate in place of the clip.

    f = (4 / tau) sigmoid(tau (r - 1)) A      r = exp(d)      tau = ``positive`` where A > 0, else ``negative``

    At r = 1 the gradient is that of policy gradient; it fades with |r - 1| and never stops at once.
    Paper: SAPO (arXiv 2511.20347).

    Args:
        positive: Temperature tau where A > 0.
        negative: Temperature tau elsewhere; larger fades sooner.
    """

    positive: float = 1.0
    negative: float = 1.05

    def __post_init__(self) -> None:
        """Refuse a temperature that divides by nothing."""
        for name, tau in (("positive", self.positive), ("negative", self.negative)):
            if not tau > 0:
                raise ConfigError(f"`{name}` of SAPO expected to be > 0, but got {tau}: it is a temperature")

    def __call__(self, terms: Terms) -> SurrogateOutput:
        """Return the value; see the class."""
        tau = torch.where(terms.advantages > 0, self.positive, self.negative).to(terms.logprobs.dtype)
        value = 4 / tau * torch.sigmoid(tau * (terms.ratio - 1)) * terms.advantages
        return SurrogateOutput(value, no_tokens(value), no_tokens(value))


@dataclass
class DPPO(Surrogate):
    """Divergence PPO: a token is left out once the policy's distribution moved too far, not its ratio.

    f = sg(min(r, cap)) A logp, and 0 where D > delta and the update would go on outwards (r > 1 with A > 0, r < 1 with
    A < 0)

    Up to the cap its gradient is that of r A. D is that of the two-outcome distribution (this token, any other): with p
    the policy's and q the anchor's probability, tv = |p - q| and kl = q ln(q / p) + (1 - q) ln((1 - q) / (1 - p)). A
    rare token may so change its ratio much, and a likely one little. Paper: DPPO (arXiv 2602.04879), which anchors at
    the sampler.

    Args:
        divergence: ``tv`` or ``kl``.
        delta_low: Largest divergence for A < 0; of use are about 0.15 for ``tv`` and 0.05 for ``kl``.
        delta_high: Largest divergence for A > 0.
        cap: Largest ratio that weighs a token.
        anchor: Whose ratio r and divergence D are: ``sampler``, the engine's policy (the paper), whose gap is then paid
            for here and not by a correction; or ``old``, the old policy.
    """

    divergence: Literal["tv", "kl"] = "tv"
    delta_low: float = 0.15
    delta_high: float = 0.15
    cap: float = 20.0
    anchor: Literal["sampler", "old"] = "sampler"

    def __post_init__(self) -> None:
        """Refuse bounds that are no bounds."""
        refuse_negative(self, delta_low=self.delta_low, delta_high=self.delta_high)
        if not self.cap >= 1:
            raise ConfigError(f"`cap` of DPPO expected to be >= 1, but got {self.cap}: it cuts on-policy tokens")

    @property
    def pays_sampler_ratio(self) -> bool:
        """Whether r is the ratio to the engine's policy."""
        return self.anchor == "sampler"

    def __call__(self, terms: Terms) -> SurrogateOutput:
        """Return the value; see the class."""
        anchor = terms.sampler_logprobs if self.anchor == "sampler" else terms.old_logprobs
        log_ratio = (terms.logprobs - anchor).detach()
        distance = self._distance(terms.logprobs.detach(), anchor)
        low = (distance > self.delta_low) & (log_ratio < 0) & (terms.advantages < 0)
        high = (distance > self.delta_high) & (log_ratio > 0) & (terms.advantages > 0)
        weight = tangent_exp(log_ratio).clamp(max=self.cap)
        value = weight * terms.advantages * terms.logprobs
        return SurrogateOutput(torch.where(low | high, 0.0, value), low, high)

    def _distance(self, logprobs: TokenFloat, anchor: TokenFloat) -> TokenFloat:
        p, q = logprobs.exp(), anchor.exp()
        if self.divergence == "tv":
            return (p - q).abs()
        # The smallest step below 1 keeps the logarithm finite where a token is certain.
        tiny = torch.finfo(p.dtype).eps
        return q * (anchor - logprobs) + (1 - q) * ((1 - q).clamp(min=tiny).log() - (1 - p).clamp(min=tiny).log())
