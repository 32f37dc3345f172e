"""How good was a completion? Advantages from rewards."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from grpo_lit.batch import SumRanks, TokenBatch
from grpo_lit.errors import ConfigError
from grpo_lit.shapes import SequenceFloat, SequenceInt

#: Added to a standard deviation before dividing by it.
STD_EPS = 1e-4
#: Rewards of a group that differ by less than this share of their size are equal: a weighted sum of equal scores may
#: differ in its last float32 digits (0.1 + 0.2 against 0.3), which is no signal.
EQUAL_SHARE = 1e-6


class Advantage(ABC):
    """Turns the rewards of a whole rollout into one advantage per sequence.

    Attributes:
        reads_rewards: Whether ``batch.rewards`` (the sum, after shaping) counts, and not only the scores.
    """

    reads_rewards: ClassVar[bool] = True

    @abstractmethod
    def __call__(self, batch: TokenBatch, sum_ranks: SumRanks) -> SequenceFloat:
        """Return the advantage of each sequence.

        Args:
            batch: The rollout of this rank, whole groups: ``rewards`` [S], ``scores`` [S K], ``group`` [S].
            sum_ranks: Sums a tensor over all ranks, for statistics of the whole rollout.
        """


@dataclass
class GroupAdvantage(Advantage):
    """Reward against the mean of its group, optionally over a standard deviation.

    A_i = (R_i - b_i) / (std + 1e-4)      b_i: mean of the group, or of its other members with ``leave_one_out``

    std is the sample standard deviation (n - 1) of the whole group, also with ``leave_one_out``: that of the others is
    0 for a lone different answer. A group whose rewards are all equal, or that has one member, has advantage exactly 0:
    it is told by max against min, since the float32 standard deviation of equal values is not 0.

    Paper: GRPO (arXiv 2402.03300); without std: Dr. GRPO (arXiv 2503.20783); std of the batch: Lite PPO
    (arXiv 2508.08221); leave-one-out: RLOO (arXiv 2402.14740).

    Args:
        scale: ``group_std`` divides by the group's, ``batch_std`` by that of all centred rewards, ``none`` by nothing.
        leave_one_out: Take the mean of the other members as baseline: n / (n - 1) times the difference to the group's
            mean, and unbiased.
    """

    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    leave_one_out: bool = False

    def __call__(self, batch: TokenBatch, sum_ranks: SumRanks) -> SequenceFloat:
        """Return the advantages; see the class."""
        rewards, group, groups = batch.rewards.double(), batch.group, len(batch.prompt_lengths)
        count = group_sum(torch.ones_like(rewards), group, groups)
        centred, std = _centre(rewards, group, groups)
        if self.leave_one_out:
            centred = centred * (count / (count - 1).clamp(min=1))[group]
        if self.scale == "group_std":
            centred = centred / (std[group] + STD_EPS)
        elif self.scale == "batch_std":
            centred = centred / (_batch_std(centred, sum_ranks) + STD_EPS)
        return centred.to(batch.rewards.dtype)


@dataclass
class GDPOAdvantage(Advantage):
    """Each reward normalised within its group, then summed, then scaled over the batch.

    A_i = Z_i / (std(Z) + 1e-4)      Z_i = sum_k w_k (s_ik - mean_k) / (std_k + 1e-4)

    mean_k and std_k are those of score k in the group, among the samples that have it: an abstained score adds
    nothing. Z sums to 0 over a group, so the batch mean that the paper takes off is 0. Only scores count: a callback
    that shapes the total reward is not seen.

    Paper: GDPO (arXiv 2601.05242).

    Args:
        weights: Weight of each reward by its name; 1 for those it leaves out. ``null``: the rewards' own weights in a
            run, 1 elsewhere.
    """

    weights: dict[str, float] | None = None

    reads_rewards: ClassVar[bool] = False

    def __call__(self, batch: TokenBatch, sum_ranks: SumRanks) -> SequenceFloat:
        """Return the advantages; see the class.

        Raises:
            ConfigError: ``weights`` names a reward that the batch does not have.
        """
        weights = self._weights(batch)
        total = torch.zeros_like(batch.rewards, dtype=torch.double)
        for k, weight in enumerate(weights):
            has = ~batch.scores[:, k].isnan()
            group, groups = batch.group[has], len(batch.prompt_lengths)
            centred, std = _centre(batch.scores[has, k].double(), group, groups)
            total[has] += weight * centred / (std[group] + STD_EPS)
        return (total / (_batch_std(total, sum_ranks) + STD_EPS)).to(batch.rewards.dtype)

    def _weights(self, batch: TokenBatch) -> list[float]:
        columns = batch.scores.shape[1]
        unknown = sorted(set(self.weights or {}) - set(batch.score_names))
        if unknown:
            raise ConfigError(
                f"`weights` of GDPOAdvantage expected names among {sorted(batch.score_names)}, but got {unknown[0]!r}"
            )
        if not self.weights:
            return [1.0] * columns
        return [self.weights.get(name, 1.0) for name in batch.score_names]


def group_sum(values: Tensor, group: SequenceInt, groups: int) -> Tensor:
    """Sum over the members of each group [N]."""
    return values.new_zeros(groups).index_add(0, group, values)


def equal_groups(rewards: Tensor, group: SequenceInt, groups: int) -> Tensor:
    """Return for each group whether all its rewards are the same value up to rounding (one member counts) [N]."""
    highest = torch.full((groups,), -torch.inf, dtype=rewards.dtype, device=rewards.device)
    lowest = torch.full((groups,), torch.inf, dtype=rewards.dtype, device=rewards.device)
    highest = highest.scatter_reduce(0, group, rewards, "amax")
    lowest = lowest.scatter_reduce(0, group, rewards, "amin")
    size = torch.maximum(highest.abs(), lowest.abs())
    return (highest <= lowest) | (highest - lowest <= EQUAL_SHARE * size)


def _centre(values: Tensor, group: SequenceInt, groups: int) -> tuple[Tensor, Tensor]:
    """Return values minus their group's mean [S], exactly 0 in equal groups, and each group's sample std [N]."""
    count = group_sum(torch.ones_like(values), group, groups)
    centred = values - (group_sum(values, group, groups) / count.clamp(min=1))[group]
    centred = torch.where(equal_groups(values, group, groups)[group], 0.0, centred)
    variance = group_sum(centred**2, group, groups) / (count - 1).clamp(min=1)
    return centred, variance.sqrt()


def _batch_std(centred: Tensor, sum_ranks: SumRanks) -> Tensor:
    """Return the sample standard deviation over all ranks of values whose mean is 0, since that of each group is."""
    squares, count = sum_ranks(torch.stack([(centred**2).sum(), centred.new_tensor(len(centred))])).unbind()
    return (squares / (count - 1).clamp(min=1)).sqrt()
