"""How good was a completion? Advantages from rewards."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_lit.batch import SumRanks, TokenBatch
from grpo_lit.shapes import SequenceFloat, SequenceInt

#: Added to a standard deviation before dividing by it.
STD_EPS = 1e-4


class Advantage(ABC):
    """Turns the rewards of a whole rollout into one advantage per sequence."""

    @abstractmethod
    def __call__(self, batch: TokenBatch, sum_ranks: SumRanks) -> SequenceFloat:
        """Return the advantage of each sequence.

        Args:
            batch: The rollout of this rank: ``rewards`` [S], ``scores`` [S K], ``group`` [S].
            sum_ranks: Sums a tensor over all ranks, for statistics of the whole rollout.
        """


@dataclass
class GroupAdvantage(Advantage):
    """Reward against the mean of its group, optionally over a standard deviation.

    A_i = (R_i - mean_j R_j) / (std + 1e-4)      std: sample standard deviation (n - 1)

    A group whose rewards are all equal, or that has one member, has advantage exactly 0: it is told by max == min,
    since the float32 standard deviation of equal values is not 0.

    Paper: GRPO (arXiv 2402.03300); without std: Dr. GRPO (arXiv 2503.20783).

    Args:
        scale: ``group_std`` divides by the group's, ``batch_std`` by that of all centred rewards, ``none`` by nothing.
    """

    scale: Literal["group_std", "batch_std", "none"] = "group_std"

    def __call__(self, batch: TokenBatch, sum_ranks: SumRanks) -> SequenceFloat:
        """Return the advantages; see the class."""
        rewards, group, groups = batch.rewards.double(), batch.group, len(batch.prompt_lengths)
        count = group_sum(torch.ones_like(rewards), group, groups)
        centred = rewards - (group_sum(rewards, group, groups) / count.clamp(min=1))[group]
        centred = torch.where(equal_groups(rewards, group, groups)[group], 0.0, centred)
        if self.scale == "group_std":
            variance = group_sum(centred**2, group, groups) / (count - 1).clamp(min=1)
            centred = centred / (variance.sqrt()[group] + STD_EPS)
        elif self.scale == "batch_std":
            centred = centred / (_global_std(centred, sum_ranks) + STD_EPS)
        return centred.to(batch.rewards.dtype)


def group_sum(values: Tensor, group: SequenceInt, groups: int) -> Tensor:
    """Sum over the members of each group [N]."""
    return values.new_zeros(groups).index_add(0, group, values)


def equal_groups(rewards: Tensor, group: SequenceInt, groups: int) -> Tensor:
    """Return for each group whether all its rewards are the same value (one member counts) [N]."""
    highest = torch.full((groups,), -torch.inf, dtype=rewards.dtype, device=rewards.device)
    lowest = torch.full((groups,), torch.inf, dtype=rewards.dtype, device=rewards.device)
    highest = highest.scatter_reduce(0, group, rewards, "amax")
    lowest = lowest.scatter_reduce(0, group, rewards, "amin")
    return highest <= lowest


def _global_std(values: Tensor, sum_ranks: SumRanks) -> Tensor:
    count, total = sum_ranks(torch.stack([values.new_tensor(len(values)), values.sum()])).unbind()
    squares = sum_ranks(((values - total / count) ** 2).sum())
    return (squares / (count - 1).clamp(min=1)).sqrt()
