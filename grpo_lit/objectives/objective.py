"""The objective: composes one part per question into a loss.

    loss = sum_i w_i sum_t [ - m_it c_it f(d_it, A_i) + beta k_it - entropy_coefficient H_it ]

w: ``Reduction``, m: ``Selection``, c: product of ``Correction``s, f: ``Surrogate``, A: ``Advantage``,
k: ``Divergence``, H: token entropy. ``Filter``s decide which sequences there are at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_lit.batch import SumRanks, TokenBatch
from grpo_lit.errors import ConfigError
from grpo_lit.metrics.rates import Rates
from grpo_lit.objectives.advantages import Advantage, GroupAdvantage
from grpo_lit.objectives.checks import refuse_contradictions
from grpo_lit.objectives.corrections import Correction
from grpo_lit.objectives.divergences import Divergence
from grpo_lit.objectives.masks import Filter, Selection
from grpo_lit.objectives.measures import derived, measure
from grpo_lit.objectives.reductions import Counts, Reduction, SequenceMean
from grpo_lit.objectives.surrogates import Surrogate, TokenClip
from grpo_lit.objectives.terms import Terms
from grpo_lit.shapes import SequenceBool, SequenceFloat, TokenBool, TokenFloat


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
        filters: Which sequences are left out, as if never drawn, once advantages are known?
        selection: Which tokens train? ``null``: all.
        entropy_coefficient: Weight of the entropy bonus. 0: none.
    """

    def __init__(
        self,
        advantage: Advantage | None = None,
        surrogate: Surrogate | None = None,
        reduction: Reduction | None = None,
        divergence: Divergence | None = None,
        corrections: Sequence[Correction] = (),
        filters: Sequence[Filter] = (),
        selection: Selection | None = None,
        entropy_coefficient: float = 0.0,
    ) -> None:
        self.advantage = advantage or GroupAdvantage()
        self.surrogate = surrogate or TokenClip()
        self.reduction = reduction or SequenceMean()
        self.divergence = divergence
        self.corrections = tuple(corrections)
        self.filters = tuple(filters)
        self.selection = selection
        self.entropy_coefficient = entropy_coefficient
        refuse_contradictions(self)

    @property
    def entropy_coefficient(self) -> float:
        """Weight of the entropy bonus; a controller may set it between steps."""
        return self._entropy_coefficient

    @entropy_coefficient.setter
    def entropy_coefficient(self, value: float) -> None:
        if not value >= 0:
            raise ConfigError(f"`entropy_coefficient` expected to be >= 0, but got {value}: it would shrink entropy")
        self._entropy_coefficient = value

    @property
    def needs_reference(self) -> bool:
        """Whether anything pays a KL, so that a reference model is held and ``reference_logprobs`` are scored."""
        return self.divergence is not None and self.divergence.pays

    @property
    def needs_reference_before_advantages(self) -> bool:
        """Whether ``batch.reference_logprobs`` must be set when :meth:`advantages` is called (KL in the reward)."""
        return self.needs_reference and self.divergence.place == "reward"

    @property
    def needs_old_entropy(self) -> bool:
        """Whether ``batch.old_entropy`` must be set when :meth:`selected` is called."""
        return self.selection is not None

    @property
    def pays_kl_in_loss(self) -> bool:
        """Whether the loss itself holds a KL term."""
        return self.needs_reference and self.divergence.place == "loss"

    def advantages(self, batch: TokenBatch, sum_ranks: SumRanks) -> SequenceFloat:
        """Return the advantage of each sequence of a whole rollout."""
        if self.needs_reference_before_advantages:
            batch = replace(batch, rewards=batch.rewards - self._reward_penalty(batch))
        return self.advantage(batch, sum_ranks)

    def kept(self, batch: TokenBatch) -> SequenceBool:
        """Return which sequences neither a callback nor a filter leaves out."""
        kept = torch.ones_like(batch.lengths, dtype=torch.bool) if batch.masked is None else ~batch.masked
        for part in self.filters:
            kept = kept & part(batch)
        return kept

    def filtered(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch without the sequences that a filter drops; call it between advantages and counts."""
        kept = self.kept(batch)
        return batch if bool(kept.all()) else batch.select(kept.nonzero().squeeze(-1))

    def selected(self, batch: TokenBatch, sum_ranks: SumRanks) -> TokenBool | None:
        """Return which tokens of an optimizer step train, for ``batch.selected``; ``None``: all."""
        return None if self.selection is None else self.selection(batch, sum_ranks)

    def weights(self, batch: TokenBatch, counts: Counts) -> SequenceFloat:
        """Return the reduction's weight of each sequence of an optimizer step."""
        return self.reduction(batch, counts)

    def contributes(self, batch: TokenBatch) -> SequenceBool:
        """Return which sequences can move the policy at all: the others need no forward, yet stay in the counts."""
        return batch.lengths > 0 if self.entropy_coefficient > 0 else self.is_moved_by_task(batch)

    def is_moved_by_task(self, batch: TokenBatch) -> SequenceBool:
        """Return which sequences can move the policy by reward or KL, whatever the entropy bonus is at the moment."""
        moves = batch.advantages != 0
        if batch.selected is not None:
            chosen = batch.lengths.new_zeros(len(batch.lengths)).index_add(0, batch.sequence, batch.selected.long())
            moves = moves & (chosen > 0)
        if self.pays_kl_in_loss:
            moves = moves | (self.divergence.coefficients(batch) > 0)
        return moves & (batch.lengths > 0)

    def loss(self, batch: TokenBatch, logprobs: TokenFloat, entropy: TokenFloat) -> LossOutput:
        """Return the loss of a micro-batch of whole sequences.

        Args:
            batch: With ``advantages`` and ``weights`` set.
            logprobs: Under the policy being trained, with gradient.
            entropy: Of the policy at each position [nats].
        """
        terms = Terms.of(batch, logprobs, entropy)
        surrogate = self.surrogate(terms)
        corrections = {type(part).__name__: part(terms) for part in self.corrections}
        factor = torch.ones_like(terms.logprobs)
        for correction in corrections.values():
            factor = factor * correction.weight
        value = factor * surrogate.value
        per_token = -value if batch.selected is None else torch.where(batch.selected, -value, 0.0)
        counted = self.is_moved_by_task(batch)[terms.sequence]
        rates = measure(terms, surrogate, corrections, factor, counted)
        if self.selection is not None:
            rates.add("optimization/selected", batch.selected[counted])
        if self.needs_reference:
            rates.add("optimization/kl_reference", self.divergence(terms)[counted])
        if self.pays_kl_in_loss:
            penalty = self.divergence.penalty(terms)
            per_token = per_token + penalty
            rates.add("optimization/kl_penalty", penalty[counted])
        if self.entropy_coefficient > 0:
            per_token = per_token - self.entropy_coefficient * terms.entropy
        loss = (batch.weights[terms.sequence] * per_token).sum()
        return LossOutput(loss, rates)

    @staticmethod
    def derived(values: dict[str, float]) -> dict[str, float]:
        """Return what to log: the means of :meth:`Rates.compute` that are no helper, and what follows from helpers."""
        return derived(values)

    def _reward_penalty(self, batch: TokenBatch) -> SequenceFloat:
        """Return beta sum_t k_t of each sequence, under the policy that sampled it."""
        if batch.reference_logprobs is None:
            raise ValueError("`batch.reference_logprobs` expected a value per token, but got None: KL is in the reward")
        sampled = batch.sampler_logprobs if batch.old_logprobs is None else batch.old_logprobs
        idle = torch.zeros_like(batch.rewards)
        terms = Terms.of(replace(batch, advantages=idle), sampled, torch.zeros_like(sampled))
        return terms.sequence_sum(self.divergence.penalty(terms))
