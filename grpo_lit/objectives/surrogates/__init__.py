"""What does the ratio do? Surrogates: the per-token value f(d, A) that is maximised."""

from grpo_lit.objectives.surrogates.base import Surrogate, SurrogateOutput, ppo_clip
from grpo_lit.objectives.surrogates.score import CISPO, PolicyGradient
from grpo_lit.objectives.surrogates.sequence import GeometricMean, SequenceClip, SequenceTokenClip
from grpo_lit.objectives.surrogates.soft import DPPO, SAPO
from grpo_lit.objectives.surrogates.token import CappedRatio, TokenClip

__all__ = [
    "CISPO",
    "DPPO",
    "SAPO",
    "CappedRatio",
    "GeometricMean",
    "PolicyGradient",
    "SequenceClip",
    "SequenceTokenClip",
    "Surrogate",
    "SurrogateOutput",
    "TokenClip",
    "ppo_clip",
]
