"""The objective and its parts. Importing this package registers every member under its short name in YAML."""

from grpo_lit.objectives.advantages import Advantage, GDPOAdvantage, GroupAdvantage
from grpo_lit.objectives.corrections import (
    Correction,
    CorrectionOutput,
    MaskedIS,
    OffPolicySequenceMask,
    SequenceMaskedIS,
    SequenceTruncatedIS,
    TruncatedIS,
)
from grpo_lit.objectives.divergences import K1, K2, K3, Divergence
from grpo_lit.objectives.masks import Filter, OverlongFilter, Selection, TopEntropy, ZeroSignalFilter
from grpo_lit.objectives.objective import LossOutput, Objective
from grpo_lit.objectives.reductions import (
    ConstantLength,
    Counts,
    GroupTokenMean,
    Reduction,
    SequenceMean,
    TokenMean,
)
from grpo_lit.objectives.shadows import Shadows
from grpo_lit.objectives.surrogates import (
    CISPO,
    DPPO,
    SAPO,
    CappedRatio,
    GeometricMean,
    PolicyGradient,
    SequenceClip,
    SequenceTokenClip,
    Surrogate,
    SurrogateOutput,
    TokenClip,
)
from grpo_lit.objectives.terms import Terms, tangent_exp

__all__ = [
    "CISPO",
    "DPPO",
    "K1",
    "K2",
    "K3",
    "SAPO",
    "Advantage",
    "CappedRatio",
    "ConstantLength",
    "Correction",
    "CorrectionOutput",
    "Counts",
    "Divergence",
    "Filter",
    "GDPOAdvantage",
    "GeometricMean",
    "GroupAdvantage",
    "GroupTokenMean",
    "LossOutput",
    "MaskedIS",
    "Objective",
    "OffPolicySequenceMask",
    "OverlongFilter",
    "PolicyGradient",
    "Reduction",
    "Selection",
    "SequenceClip",
    "SequenceMaskedIS",
    "SequenceMean",
    "SequenceTokenClip",
    "SequenceTruncatedIS",
    "Shadows",
    "Surrogate",
    "SurrogateOutput",
    "Terms",
    "TokenClip",
    "TokenMean",
    "TopEntropy",
    "TruncatedIS",
    "ZeroSignalFilter",
    "tangent_exp",
]
