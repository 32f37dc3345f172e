"""The surrogate ABC, what it returns, and PPO's clip that several members share."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from grpo_lit.errors import ConfigError
from grpo_lit.objectives.terms import Terms
from grpo_lit.shapes import TokenBool, TokenFloat


@dataclass(frozen=True)
class SurrogateOutput:
    """Value to maximise, and which tokens a bound holds.

    Attributes:
        value: f(d, A) of each token.
        clipped_low: The lower bound is active.
        clipped_high: The upper bound is active.
    """

    value: TokenFloat
    clipped_low: TokenBool
    clipped_high: TokenBool


class Surrogate(ABC):
    """Per-token value f(d, A) with d the log-ratio of new to old policy and A the advantage.

    Attributes:
        level: ``sequence`` where the value of one token moves the log-probs of others, so that leaving single tokens
            out has no meaning.
    """

    level: ClassVar[Literal["token", "sequence"]] = "token"

    @property
    def pays_sampler_ratio(self) -> bool:
        """Whether the value already holds the ratio to the engine's policy, which a correction must not pay again."""
        return False

    @abstractmethod
    def __call__(self, terms: Terms) -> SurrogateOutput:
        """Return the value of every token of the micro-batch."""


def ppo_clip(ratio: TokenFloat, advantages: TokenFloat, low: float, high: float) -> SurrogateOutput:
    """min(r A, clip(r, 1 - low, 1 + high) A), and where the clip holds."""
    clipped = ratio.clamp(1 - low, 1 + high)
    return SurrogateOutput(
        value=torch.minimum(ratio * advantages, clipped * advantages),
        clipped_low=(ratio < 1 - low) & (advantages < 0),
        clipped_high=(ratio > 1 + high) & (advantages > 0),
    )


def refuse_negative(part: Surrogate, **bounds: float) -> None:
    """Refuse a bound below 0, naming the part and the bound."""
    for name, value in bounds.items():
        if not value >= 0:
            raise ConfigError(f"`{name}` of {type(part).__name__} expected to be >= 0, but got {value}")
