"""What does the ratio do? Surrogates: the per-token value f(d, A) that is maximised."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from grpo_lit.errors import ConfigError
from grpo_lit.objectives.terms import Terms
from grpo_lit.shapes import TokenBool, TokenFloat


@dataclass(frozen=True)
class SurrogateOutput:
    """Value to maximise, and which tokens a bound holds (their gradient is cut).

    Attributes:
        value: f(d, A) of each token.
        clipped_low: The lower bound is active.
        clipped_high: The upper bound is active.
    """

    value: TokenFloat
    clipped_low: TokenBool
    clipped_high: TokenBool


class Surrogate(ABC):
    """Per-token value f(d, A) with d the log-ratio of new to old policy and A the advantage."""

    @abstractmethod
    def __call__(self, terms: Terms) -> SurrogateOutput:
        """Return the value of every token of the micro-batch."""


@dataclass
class TokenClip(Surrogate):
    """PPO's clipped ratio, token by token.

    f = min(r A, clip(r, 1 - low, 1 + high) A)      r = exp(d)

    Papers: PPO (arXiv 1707.06347); low and high apart ("clip-higher"): DAPO (arXiv 2503.14476).

    Args:
        low: How far below 1 the ratio still earns when A < 0.
        high: How far above 1 the ratio still earns when A > 0.
    """

    low: float = 0.2
    high: float = 0.2

    def __post_init__(self) -> None:
        """Refuse bounds that are no bounds."""
        if not self.low >= 0 or not self.high >= 0:
            raise ConfigError(f"`low` and `high` of TokenClip expected to be >= 0, but got {self.low} and {self.high}")

    def __call__(self, terms: Terms) -> SurrogateOutput:
        """Return the value; see the class."""
        ratio, advantages = terms.log_ratio.exp(), terms.advantages
        clipped = ratio.clamp(1 - self.low, 1 + self.high)
        return SurrogateOutput(
            value=torch.minimum(ratio * advantages, clipped * advantages),
            clipped_low=(ratio < 1 - self.low) & (advantages < 0),
            clipped_high=(ratio > 1 + self.high) & (advantages > 0),
        )
