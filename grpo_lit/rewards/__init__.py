"""Rewards: what a completion is worth.

Importing this package makes every reward known to YAML by its short name.
"""

from grpo_lit.rewards.choice import MultipleChoice
from grpo_lit.rewards.code import CodeTests
from grpo_lit.rewards.combination import RewardCombination, WeightedReward
from grpo_lit.rewards.format import RegexFormat, ThinkAnswerFormat, TokenFormat
from grpo_lit.rewards.math import MathEquivalence
from grpo_lit.rewards.numeric import NumericCloseness, NumericMatch
from grpo_lit.rewards.reasoning_gym import ReasoningGymScore
from grpo_lit.rewards.reward import Reward

__all__ = [
    "CodeTests",
    "MathEquivalence",
    "MultipleChoice",
    "NumericCloseness",
    "NumericMatch",
    "ReasoningGymScore",
    "RegexFormat",
    "Reward",
    "RewardCombination",
    "ThinkAnswerFormat",
    "TokenFormat",
    "WeightedReward",
]
