"""Who takes part? Filters leave whole sequences out, selections single tokens."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from grpo_lit.batch import SumRanks, TokenBatch
from grpo_lit.errors import ConfigError
from grpo_lit.shapes import SequenceBool, TokenBool, TokenFloat


class Filter(ABC):
    """Leaves sequences out of an optimizer step, counts included, as if they had never been drawn.

    It acts after the advantages: a sequence left out still took part in the baseline of its group.
    """

    @abstractmethod
    def __call__(self, batch: TokenBatch) -> SequenceBool:
        """Return which sequences stay; ``batch.advantages`` is set."""


@dataclass
class OverlongFilter(Filter):
    """Leave out answers that ran into the length limit: nobody knows how they would have ended.

    Paper: DAPO (arXiv 2503.14476), "overlong filtering".
    """

    def __call__(self, batch: TokenBatch) -> SequenceBool:
        """Return which sequences ended by themselves."""
        if batch.truncated is None:
            raise ValueError("`batch.truncated` expected a flag per sequence, but got None: OverlongFilter needs it")
        return ~batch.truncated


@dataclass
class ZeroSignalFilter(Filter):
    """Leave out sequences with advantage 0, so that the others are averaged among themselves.

    Without it they stay in the counts and shrink the step. Paper: OLMo 3 (arXiv 2512.13961).
    """

    def __call__(self, batch: TokenBatch) -> SequenceBool:
        """Return which sequences have a signal."""
        return batch.advantages != 0


class Selection(ABC):
    """Chooses the tokens whose surrogate trains; KL, entropy and counts keep all."""

    @abstractmethod
    def __call__(self, batch: TokenBatch, sum_ranks: SumRanks) -> TokenBool:
        """Return which tokens of this rank's optimizer step train; ``batch.old_entropy`` is set."""


@dataclass
class TopEntropy(Selection):
    """Train on the tokens where the policy is least sure: the top share by entropy of the whole optimizer step.

    m_t = [H_t >= tau]      tau: largest threshold that keeps at least ``share`` of all tokens of the step, all ranks

    H is the entropy under the old policy, scored before the first update, so that one threshold serves every
    micro-batch; a threshold from each micro-batch's own tokens would make the gradient depend on the split.
    Paper: "Beyond the 80/20 Rule" (arXiv 2506.01939).

    Args:
        share: Share of tokens that train.
    """

    share: float = 0.2

    def __post_init__(self) -> None:
        """Refuse a share that is none."""
        if not 0 < self.share <= 1:
            raise ConfigError(f"`share` of TopEntropy expected to be in (0, 1], but got {self.share}")

    def __call__(self, batch: TokenBatch, sum_ranks: SumRanks) -> TokenBool:
        """Return which tokens train; see the class."""
        if batch.old_entropy is None:
            raise ValueError("`batch.old_entropy` expected a value per token, but got None: TopEntropy needs it")
        return batch.old_entropy >= top_share_threshold(batch.old_entropy, self.share, sum_ranks)


#: Entropy [nats] above that of any vocabulary: ln(4e9).
_HIGHEST_ENTROPY = 22.2
#: 32 halvings bring the bracket below float32's resolution of an entropy of 0.01 nats.
_HALVINGS = 32


def top_share_threshold(values: TokenFloat, share: float, sum_ranks: SumRanks) -> float:
    """Return the largest threshold that at least ``share`` of the values over all ranks reach.

    Bisection: each rank adds its count above a common candidate, so no rank sees another's values, all do the same
    number of sums, and neither order nor split matters. Equal values stand or fall together.
    """
    wanted = share * float(sum_ranks(torch.tensor(float(len(values)), dtype=torch.double, device=values.device)))
    low, high = 0.0, _HIGHEST_ENTROPY
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        reached = float(sum_ranks((values >= middle).sum().double()))
        low, high = (middle, high) if reached >= wanted else (low, middle)
    return low
