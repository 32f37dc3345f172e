"""The objective and its parts. Importing this package registers every member under its short name in YAML."""

from grpo_lit.objectives.advantages import Advantage, GroupAdvantage
from grpo_lit.objectives.corrections import Correction, TruncatedIS
from grpo_lit.objectives.divergences import K3, Divergence
from grpo_lit.objectives.objective import LossOutput, Objective
from grpo_lit.objectives.reductions import ConstantLength, Counts, Reduction, SequenceMean, TokenMean
from grpo_lit.objectives.surrogates import Surrogate, TokenClip

__all__ = [
    "K3",
    "Advantage",
    "ConstantLength",
    "Correction",
    "Counts",
    "Divergence",
    "GroupAdvantage",
    "LossOutput",
    "Objective",
    "Reduction",
    "SequenceMean",
    "Surrogate",
    "TokenClip",
    "TokenMean",
    "TruncatedIS",
]
