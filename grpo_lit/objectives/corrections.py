"""Was the sampler someone else? Corrections: detached factors for the gap between engine and learner."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

from grpo_lit.errors import ConfigError
from grpo_lit.objectives.terms import Terms, bounded
from grpo_lit.shapes import TokenBool, TokenFloat

#: Whose product over a sequence: the mean of log-ratios, or their sum.
SequenceRatio = Literal["geometric", "product"]
#: What the tokens that a mask keeps weigh: their ratio, or 1.
KeptWeight = Literal["ratio", "one"]


@dataclass(frozen=True)
class CorrectionOutput:
    """A factor per token, where it was cut, and the raw log-ratio that decided.

    Attributes:
        weight: Detached factor of the surrogate.
        cut: A bound holds: the factor is not what the raw ratio says.
        log_ratio: Raw log-ratio before any cut, the sequence's for a sequence-level part [nats].
    """

    weight: TokenFloat
    cut: TokenBool
    log_ratio: TokenFloat


class Correction(ABC):
    """A detached factor per token; several multiply."""

    @property
    def pays_sampler_ratio(self) -> bool:
        """Whether the factor holds the ratio to the engine's policy, which may be paid once only."""
        return False

    @abstractmethod
    def __call__(self, terms: Terms) -> CorrectionOutput:
        """Return the factor of every token of the micro-batch."""


class _Capped(Correction):
    """What both truncations share: the ratio, up to a cap."""

    cap: float

    def __post_init__(self) -> None:
        """Refuse a cap that would cut what is on-policy."""
        if not self.cap >= 1:
            raise ConfigError(
                f"`cap` of {type(self).__name__} expected to be >= 1, but got {self.cap}: it cuts on-policy tokens"
            )

    @property
    def pays_sampler_ratio(self) -> bool:
        """The factor is the ratio."""
        return True


@dataclass
class TruncatedIS(_Capped):
    """Token-level truncated importance sampling (TIS) of the engine's policy.

    c = min(rho, cap)      rho = exp(logp_old - logp_sampler)

    Source: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).

    Args:
        cap: Largest factor.
    """

    cap: float = 2.0

    def __call__(self, terms: Terms) -> CorrectionOutput:
        """Return the factor; see the class."""
        return _truncate(_token_log_ratio(terms), self.cap)


@dataclass
class SequenceTruncatedIS(_Capped):
    """Sequence-level truncated importance sampling: one factor for all tokens of a sequence.

    c = min(rho_i, cap)      rho_i = exp(sum_t (logp_old - logp_sampler)), or of the mean with ``ratio: geometric``

    The product is the exact ratio of the sequence; its variance grows with length, which the cap bounds.
    Source: J. Liu et al., "When Speed Kills Stability" (2025).

    Args:
        cap: Largest factor.
        ratio: ``product`` or ``geometric``.
    """

    cap: float = 2.0
    ratio: SequenceRatio = "product"

    def __call__(self, terms: Terms) -> CorrectionOutput:
        """Return the factor; see the class."""
        return _truncate(_sequence_log_ratio(terms, self.ratio), self.cap)


class _Banded(Correction):
    """What both masks share: a band that on-policy ratios are in, and what is kept."""

    low: float
    high: float
    kept: KeptWeight

    def __post_init__(self) -> None:
        """Refuse a band that leaves out what is on-policy."""
        if not 0 <= self.low <= 1 <= self.high:
            raise ConfigError(
                f"`low` and `high` of {type(self).__name__} expected 0 <= low <= 1 <= high, but got {self.low} and "
                f"{self.high}: an on-policy token has ratio 1"
            )

    @property
    def pays_sampler_ratio(self) -> bool:
        """Whether what is kept weighs its ratio."""
        return self.kept == "ratio"


@dataclass
class MaskedIS(_Banded):
    """Token-level masked importance sampling (MIS): tokens outside the band are left out.

    c = rho where low <= rho <= high, else 0      rho = exp(logp_old - logp_sampler)

    Source: IcePop, Ling team, "Small Leak Can Sink a Great Ship" (2025), with this band.

    Args:
        low: Smallest ratio that is kept.
        high: Largest ratio that is kept.
        kept: What a kept token weighs: its ``ratio``, or ``one`` (a mask only).
    """

    low: float = 0.5
    high: float = 5.0
    kept: KeptWeight = "ratio"

    def __call__(self, terms: Terms) -> CorrectionOutput:
        """Return the factor; see the class."""
        return _mask(_token_log_ratio(terms), self.low, self.high, self.kept)


@dataclass
class SequenceMaskedIS(_Banded):
    """Sequence-level masked importance sampling: sequences outside the band are left out.

    c = rho_i where low <= rho_i <= high, else 0      rho_i = exp(mean_t (logp_old - logp_sampler)), or of the sum

    The mean does not depend on length, the sum is the exact ratio.
    Source: J. Liu et al., "When Speed Kills Stability" (2025).

    Args:
        low: Smallest ratio that is kept.
        high: Largest ratio that is kept.
        ratio: ``geometric`` or ``product``.
        kept: What a kept sequence weighs: its ``ratio``, or ``one`` (a mask only).
    """

    low: float = 0.5
    high: float = 2.0
    ratio: SequenceRatio = "geometric"
    kept: KeptWeight = "ratio"

    def __call__(self, terms: Terms) -> CorrectionOutput:
        """Return the factor; see the class."""
        return _mask(_sequence_log_ratio(terms, self.ratio), self.low, self.high, self.kept)


@dataclass
class OffPolicySequenceMask(Correction):
    """Leave out bad answers that the policy of today would hardly give.

    c = 0 where A < 0 and mean_t (logp_behaviour - logp) > delta, else 1

    Paper: DeepSeek-V3.2 (arXiv 2512.02556), whose behaviour policy is the engine's, so that staleness and the engine's
    numerical gap count together. The paper prints no delta.

    Args:
        delta: Largest mean fall of the log-prob per token [nats].
        behaviour: ``sampler``, the engine's log-probs (the paper); or ``old``, the old policy's: staleness alone.
    """

    delta: float = 0.1
    behaviour: Literal["sampler", "old"] = "sampler"

    def __post_init__(self) -> None:
        """Refuse a bound that leaves out on-policy sequences."""
        if not self.delta >= 0:
            raise ConfigError(f"`delta` of OffPolicySequenceMask expected to be >= 0, but got {self.delta}")

    def __call__(self, terms: Terms) -> CorrectionOutput:
        """Return the factor; see the class."""
        behaviour = terms.sampler_logprobs if self.behaviour == "sampler" else terms.old_logprobs
        fall = terms.spread(terms.sequence_mean(behaviour - terms.logprobs.detach()))
        cut = (fall > self.delta) & (terms.advantages < 0)
        return CorrectionOutput(weight=(~cut).to(fall.dtype), cut=cut, log_ratio=-fall)


def _token_log_ratio(terms: Terms) -> TokenFloat:
    return (terms.old_logprobs - terms.sampler_logprobs).detach()


def _sequence_log_ratio(terms: Terms, ratio: SequenceRatio) -> TokenFloat:
    reduce = terms.sequence_mean if ratio == "geometric" else terms.sequence_sum
    return terms.spread(reduce(_token_log_ratio(terms)))


def _truncate(log_ratio: TokenFloat, cap: float) -> CorrectionOutput:
    ratio = bounded(log_ratio).exp()
    return CorrectionOutput(weight=ratio.clamp(max=cap), cut=ratio > cap, log_ratio=log_ratio)


def _mask(log_ratio: TokenFloat, low: float, high: float, kept: KeptWeight) -> CorrectionOutput:
    ratio = bounded(log_ratio).exp()
    cut = (ratio < low) | (ratio > high)
    weight = torch.where(cut, 0.0, ratio if kept == "ratio" else torch.ones_like(ratio))
    return CorrectionOutput(weight=weight, cut=cut, log_ratio=log_ratio)
