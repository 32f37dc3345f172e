"""The objective: composes one part per question into a loss.

    loss = sum_i w_i sum_t [ - c_it f(d_it, A_i) + beta k_it - entropy_coefficient H_it ]

w: ``Reduction``, c: product of ``Correction``s, f: ``Surrogate``, A: ``Advantage``, k: ``Divergence``, H: token entropy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_lit.batch import SumRanks, TokenBatch
from grpo_lit.errors import ConfigError
from grpo_lit.metrics.rates import Rates
from grpo_lit.objectives.advantages import Advantage, GroupAdvantage
from grpo_lit.objectives.corrections import Correction
from grpo_lit.objectives.divergences import Divergence
from grpo_lit.objectives.reductions import Counts, Reduction, SequenceMean
from grpo_lit.objectives.surrogates import Surrogate, SurrogateOutput, TokenClip
from grpo_lit.objectives.terms import Terms, bounded
from grpo_lit.shapes import SequenceBool, SequenceFloat, TokenFloat


@dataclass(frozen=True)
class LossOutput:
    """Loss of a micro-batch, and what to log of it.

    Attributes:
        loss: This micro-batch's share of the step's loss (shares add up).
        rates: Sums of numerators and denominators, to be added over micro-batches and ranks.
    """

    loss: Float[Tensor, ""]
    rates: Rates


class Objective:
    """A recipe: one part for each question.

    Args:
        advantage: How good was a completion? Default: group mean and standard deviation (GRPO).
        surrogate: What does the ratio do? Default: PPO's token clip.
        reduction: How are tokens averaged? Default: mean over sequences of their token means (GRPO).
        divergence: What holds the policy near the reference? ``null``: nothing, and no reference model is held.
        corrections: Factors for the gap between sampler and learner; several multiply.
        entropy_coefficient: Weight of the entropy bonus. 0: none.
    """

    def __init__(
        self,
        advantage: Advantage | None = None,
        surrogate: Surrogate | None = None,
        reduction: Reduction | None = None,
        divergence: Divergence | None = None,
        corrections: Sequence[Correction] = (),
        entropy_coefficient: float = 0.0,
    ) -> None:
        self.advantage = advantage or GroupAdvantage()
        self.surrogate = surrogate or TokenClip()
        self.reduction = reduction or SequenceMean()
        self.divergence = divergence
        self.corrections = tuple(corrections)
        self.entropy_coefficient = entropy_coefficient
        if entropy_coefficient < 0:
            raise ConfigError(
                f"`entropy_coefficient` expected to be >= 0, but got {entropy_coefficient}: it would shrink entropy"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether any token pays a KL to the reference."""
        return self.divergence is not None and self.divergence.beta > 0

    def advantages(self, batch: TokenBatch, sum_ranks: SumRanks) -> SequenceFloat:
        """Return the advantage of each sequence of a whole rollout."""
        return self.advantage(batch, sum_ranks)

    def weights(self, batch: TokenBatch, counts: Counts) -> SequenceFloat:
        """Return the reduction's weight of each sequence of an optimizer step."""
        return self.reduction(batch, counts)

    def contributes(self, batch: TokenBatch) -> SequenceBool:
        """Return which sequences can move the policy at all: the others need no forward, yet stay in the counts."""
        if self.needs_reference or self.entropy_coefficient > 0:
            return batch.lengths > 0
        return (batch.advantages != 0) & (batch.lengths > 0)

    def loss(self, batch: TokenBatch, logprobs: TokenFloat, entropy: TokenFloat) -> LossOutput:
        """Return the loss of a micro-batch of whole sequences.

        Args:
            batch: With ``advantages`` and ``weights`` set.
            logprobs: Under the policy being trained, with gradient.
            entropy: Of the policy at each position [nats].
        """
        terms = Terms.of(batch, logprobs, entropy)
        surrogate = self.surrogate(terms)
        corrections = [correction(terms) for correction in self.corrections]
        factor = torch.ones_like(logprobs)
        for correction in corrections:
            factor = factor * correction.weight
        per_token = -factor * surrogate.value
        rates = self._rates(terms, surrogate)
        for correction in corrections:
            rates.add("system/is_cut", correction.cut)
        if corrections:
            rates.add("_is_weight", factor)
            rates.add("_is_weight_squared", factor**2)
        if self.needs_reference:
            kl = self.divergence(terms)
            per_token = per_token + self.divergence.beta * kl
            rates.add("optimization/kl_reference", kl)
        if self.entropy_coefficient > 0:
            per_token = per_token - self.entropy_coefficient * entropy
        loss = (batch.weights[terms.sequence] * per_token).sum()
        return LossOutput(loss, rates)

    @staticmethod
    def _rates(terms: Terms, surrogate: SurrogateOutput) -> Rates:
        rates = Rates()
        rates.add("optimization/clip_low", surrogate.clipped_low)
        rates.add("optimization/clip_high", surrogate.clipped_high)
        rates.add("optimization/kl_old", terms.log_ratio.exp() - terms.log_ratio - 1)
        rates.maximum("optimization/ratio_max", terms.log_ratio.exp())
        rates.add("exploration/entropy", terms.entropy)
        rates.add("exploration/token_prob", terms.old_logprobs.exp())
        gap = terms.old_logprobs - terms.sampler_logprobs
        rates.add("system/mismatch_abs", gap.abs())
        rates.add("system/mismatch_kl", bounded(gap).exp() - bounded(gap) - 1)
        return rates
