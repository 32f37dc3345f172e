"""How are tokens averaged? Reductions: one weight per sequence from counts of the whole optimizer step."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from grpo_lit.batch import SumRanks, TokenBatch
from grpo_lit.errors import ConfigError
from grpo_lit.objectives.advantages import group_sum
from grpo_lit.shapes import SequenceFloat


@dataclass(frozen=True)
class Counts:
    """What one optimizer step holds, over all ranks; zero-advantage sequences included, filtered ones not.

    Attributes:
        sequences: S.
        tokens: T.
        groups: Prompts with at least one token.
    """

    sequences: int
    tokens: int
    groups: int

    @classmethod
    def of(cls, batch: TokenBatch, sum_ranks: SumRanks) -> "Counts":
        """Count one optimizer step; every rank passes its own whole groups."""
        groups = batch.group[batch.lengths > 0].unique().numel()
        mine = torch.tensor([len(batch.lengths), batch.tokens, groups], device=batch.lengths.device)
        sequences, tokens, groups = sum_ranks(mine).tolist()
        return cls(sequences=int(sequences), tokens=int(tokens), groups=int(groups))


class Reduction(ABC):
    """Gives each sequence its weight w: the loss is sum_i w_i sum_t loss_it, however it is split.

    Weights come before micro-batching and from counts over all ranks, so that no split, rank or order can change them.
    """

    @abstractmethod
    def __call__(self, batch: TokenBatch, counts: Counts) -> SequenceFloat:
        """Return the weight of each sequence.

        Args:
            batch: This rank's sequences of the optimizer step.
            counts: The same step over all ranks.
        """


@dataclass
class SequenceMean(Reduction):
    """Every sequence weighs the same: w = 1 / (S len). Paper: GRPO (arXiv 2402.03300)."""

    def __call__(self, batch: TokenBatch, counts: Counts) -> SequenceFloat:
        """Return the weights; an empty sequence has no token to weigh."""
        return 1.0 / (max(counts.sequences, 1) * batch.lengths.clamp(min=1).to(batch.rewards.dtype))


@dataclass
class TokenMean(Reduction):
    """Every token of the step weighs the same: w = 1 / sum_j len_j. Paper: DAPO (arXiv 2503.14476)."""

    def __call__(self, batch: TokenBatch, counts: Counts) -> SequenceFloat:
        """Return the weights."""
        return batch.rewards.new_full((len(batch.lengths),), 1.0 / max(counts.tokens, 1))


@dataclass
class GroupTokenMean(Reduction):
    """Every group weighs the same, and every token within it: w = 1 / (N sum_{j in group} len_j).

    A prompt with long answers does not outweigh the others. The sequences of a group must be on one rank and in one
    optimizer step. Paper: DAPO (arXiv 2503.14476) as its equation reads, an expectation over prompts.
    """

    def __call__(self, batch: TokenBatch, counts: Counts) -> SequenceFloat:
        """Return the weights; a group without a token has none to weigh."""
        tokens = group_sum(batch.lengths.to(batch.rewards.dtype), batch.group, len(batch.prompt_lengths))
        return 1.0 / (max(counts.groups, 1) * tokens.clamp(min=1)[batch.group])


@dataclass
class ConstantLength(Reduction):
    """Every token weighs the same whatever the step holds: w = 1 / (S L). Paper: Dr. GRPO (arXiv 2503.20783).

    Args:
        length: L, the most tokens a completion may have; a constant, never the width of the batch at hand.
    """

    length: int = 256

    def __post_init__(self) -> None:
        """Refuse a length that divides by nothing."""
        if self.length < 1:
            raise ConfigError(f"`length` of ConstantLength expected to be >= 1, but got {self.length}")

    def __call__(self, batch: TokenBatch, counts: Counts) -> SequenceFloat:
        """Return the weights."""
        return batch.rewards.new_full((len(batch.lengths),), 1.0 / (max(counts.sequences, 1) * self.length))
