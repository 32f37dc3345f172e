"""The learner: gradients of the objective over token-budgeted micro-batches, and log-probs of whole batches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_lit.batch import TokenBatch
from grpo_lit.metrics.rates import Rates
from grpo_lit.objectives.objective import Objective
from grpo_lit.objectives.reductions import Counts
from grpo_lit.objectives.shadows import Shadows
from grpo_lit.policy.packing import Pack, pack_rows, plan_micro_batches
from grpo_lit.policy.policy import Policy, PolicyOutput, Scorer
from grpo_lit.ranks import Ranks
from grpo_lit.rollouts.minibatch import UpdatePlan
from grpo_lit.shapes import SequenceBool, SequenceInt, TokenFloat

#: Measures a micro-batch with advantages, weights and old log-probs, given what the policy said of it. Called before
#: its backward; and at the start of a step on no sequence at all, where the rates must have every name.
Measurement = Callable[[TokenBatch, PolicyOutput], Rates]


@dataclass(frozen=True)
class GradientOutput:
    """What one optimizer step's gradient was made of.

    Attributes:
        loss: Of the whole step, over all ranks.
        rates: What to log; this rank's share.
        micro_batches: Forward and backward passes of each rank; 0: nothing could move the weights.
        tokens: Completion tokens of this rank that went through the policy.
    """

    loss: float
    rates: Rates
    micro_batches: int
    tokens: int


class Learner:
    """Runs policies over batches, micro-batch by micro-batch.

    Args:
        objective: The recipe.
        budget: Most input tokens of a micro-batch, padding included.
        share_prefix: One copy of a prompt for its completions, where the architecture allows it.
        ranks: Sums over processes.
        device: Where the policies are.
        shadows: Recipes to measure beside it.
        measurements: What else to measure of every micro-batch.
    """

    def __init__(
        self,
        objective: Objective,
        budget: int,
        share_prefix: bool,
        ranks: Ranks,
        device: torch.device,
        shadows: Shadows | None = None,
        measurements: Sequence[Measurement] = (),
    ) -> None:
        self.objective, self.budget, self.share_prefix = objective, budget, share_prefix
        self.ranks, self.device, self.shadows = ranks, device, shadows or Shadows({})
        self.measurements = measurements

    def counts(self, batch: TokenBatch) -> Counts:
        """Return what an optimizer step holds over all ranks."""
        return Counts.of(batch, self.ranks.sum)

    def contributes(self, batch: TokenBatch) -> SequenceBool:
        """Return which sequences go through the policy: those that move it, or a shadow of it."""
        return self.objective.contributes(batch) | self.shadows.contributes(batch)

    @torch.no_grad()
    def evaluate(self, policy: Scorer, batch: TokenBatch, sequences: SequenceInt | None = None) -> PolicyOutput:
        """Return what a policy says of every token of the chosen sequences [T], 0 elsewhere; all ranks must call.

        Args:
            policy: Any of them.
            batch: This rank's sequences.
            sequences: Which of them; ``None``: all.
        """
        sequences = torch.arange(len(batch.lengths)) if sequences is None else sequences
        logprobs, entropy = (torch.zeros_like(batch.sampler_logprobs) for _ in range(2))
        for chosen, micro, pack in self._micro_batches(batch, sequences)[1]:
            output = _output(policy, micro.to(self.device), pack.to(self.device))
            if chosen is not None:
                positions = batch.token_positions(chosen)
                logprobs[positions], entropy[positions] = output.logprobs.cpu(), output.entropy.cpu()
        return PolicyOutput(logprobs, entropy)

    def prepare(
        self, batch: TokenBatch, plan: UpdatePlan, policy: Policy, reference: Scorer | None
    ) -> tuple[TokenBatch, list[SequenceInt]]:
        """Return a fresh rollout with advantages, filters and old log-probs, and the sequences of each update.

        Old log-probs are scored for the sequences that a later update trains on; on the first one the policy is its
        own old policy, and no forward is spent. All ranks must call.

        Args:
            batch: As drawn.
            plan: The optimizer steps that will be made on it.
            policy: The weights before the first of them.
            reference: For a KL that is paid in the reward.
        """
        objective, shadows = self.objective, self.shadows
        if objective.needs_reference_before_advantages or shadows.needs_reference_before_advantages:
            batch = replace(batch, reference_logprobs=self.evaluate(reference, batch).logprobs)
        batch = replace(batch, advantages=objective.advantages(batch, self.ranks.sum))
        batch = objective.filtered(shadows.with_advantages(batch, self.ranks.sum))
        updates = plan.sequences(batch, self.ranks.sum)
        if objective.needs_old_entropy:
            old = self.evaluate(policy, batch)
            return replace(batch, old_logprobs=_of_sampler(batch, old.logprobs), old_entropy=old.entropy), updates
        if plan.steps > 1:
            later = torch.cat(updates[1:]).unique()
            later = later[self.contributes(batch)[later]]
            if batch.stale is not None:
                later = later[~batch.stale[later]]  # their old policy is their sampler
            # Where nothing moves the policy the sampler's log-probs stand in: an entropy bonus may yet switch on.
            logprobs, scored = batch.sampler_logprobs.clone(), batch.token_positions(later)
            logprobs[scored] = self.evaluate(policy, batch, later).logprobs[scored]
            batch = replace(batch, old_logprobs=_of_sampler(batch, logprobs))
        return batch, updates

    def gradient(
        self,
        policy: Policy,
        batch: TokenBatch,
        backward: Callable[[Tensor], None],
        without_sync: Callable[[bool], AbstractContextManager],
        reference: Scorer | None = None,
        old_policy: Scorer | None = None,
    ) -> GradientOutput:
        """Accumulate the gradient of one optimizer step; all ranks must call.

        Args:
            policy: Being trained.
            batch: This rank's sequences of the step, with advantages.
            backward: Called with each micro-batch's loss.
            without_sync: Called with whether another micro-batch follows; its context holds back the gradient
                all-reduce until the last one.
            reference: Scores each micro-batch where the objective pays a KL.
            old_policy: Scores each micro-batch where the old log-probs are not in the batch.
        """
        batch = replace(batch, selected=self.objective.selected(batch, self.ranks.sum))
        batch = replace(batch, weights=self.objective.weights(batch, self.counts(batch)))
        batch = self.shadows.with_weights(batch, self.ranks.sum)
        rates, loss, tokens = self._empty_rates(batch), torch.zeros((), dtype=torch.float64), 0
        possible = batch.lengths[:0] if batch.kept_counts is None else batch.kept_counts
        rates.add("system/kept_tokens", possible[possible > 0])
        # A batch that moves only shadows is none to train on.
        moving = float(self.ranks.sum(self.objective.contributes(batch).sum()))
        count, steps = self._micro_batches(batch, self.contributes(batch).nonzero()[:, 0]) if moving else (0, iter(()))
        score_reference = reference is not None and batch.reference_logprobs is None
        for index, (chosen, micro, pack) in enumerate(steps):
            micro, pack = micro.to(self.device), pack.to(self.device)
            with torch.no_grad():
                if score_reference:
                    micro = replace(micro, reference_logprobs=_output(reference, micro, pack).logprobs)
                if old_policy is not None:
                    old = _output(old_policy, micro, pack).logprobs
                    micro = replace(micro, old_logprobs=_of_sampler(micro, old))
            with without_sync(index + 1 < count):
                output = _output(policy, micro, pack)
                if chosen is None:  # another rank has more micro-batches: keep step with its collectives
                    backward(output.logprobs.sum() * 0.0)
                    continue
                part = self.objective.loss(micro, output.logprobs, output.entropy)
                rates.merge(self._measured(micro, output))
                # Gradients are averaged over ranks, while the weights already count all ranks' sequences.
                backward(part.loss * self.ranks.world_size)
            rates.merge(part.rates)
            rates.merge(self.shadows.measure(self.objective, micro, output.logprobs, output.entropy))
            loss += part.loss.detach().double().cpu()
            tokens += micro.tokens
        return GradientOutput(float(self.ranks.sum(loss)), rates, count, tokens)

    def _micro_batches(
        self, batch: TokenBatch, sequences: SequenceInt
    ) -> tuple[int, Iterator[tuple[SequenceInt | None, TokenBatch, Pack]]]:
        """Return how many micro-batches the rank has that needs most of them, and as many, each made in its turn.

        ``None`` marks one that only keeps step.
        """
        part = batch.select(sequences)
        plan = plan_micro_batches(part, self.budget, self.share_prefix)
        # Asked before the first forward, which is itself a collective where parameters are sharded.
        most = int(self.ranks.max(torch.tensor(len(plan))))

        def micro_batches() -> Iterator[tuple[SequenceInt | None, TokenBatch, Pack]]:
            for rows in plan:
                order = torch.tensor([i for row in rows for unit in row for i in unit.sequences], dtype=torch.long)
                yield sequences[order], *pack_rows(part, rows, masks=self.device.type == "cpu")
            for _ in range(most - len(plan)):
                yield None, *_idle_micro_batch(batch)

        return most, micro_batches()

    def _empty_rates(self, batch: TokenBatch) -> Rates:
        """Return every name of the objective's rates without a value, so that idle ranks add the same ones."""
        nothing = batch.select(torch.zeros(0, dtype=torch.long))
        empty = nothing.sampler_logprobs
        nothing = replace(nothing, reference_logprobs=empty, advantages=nothing.rewards, weights=nothing.rewards)
        rates = self.objective.loss(nothing, empty, empty).rates
        rates.merge(self.shadows.measure(self.objective, nothing, empty, empty))
        return rates.merge(self._measured(nothing, PolicyOutput(empty, empty)))

    @torch.no_grad()
    def _measured(self, micro: TokenBatch, output: PolicyOutput) -> Rates:
        rates = Rates()
        for measurement in self.measurements:
            rates.merge(measurement(micro, output))
        return rates


def _of_sampler(batch: TokenBatch, old_logprobs: TokenFloat) -> TokenFloat:
    """Return old log-probs with the sampler's own where older weights sampled."""
    if batch.stale is None:
        return old_logprobs
    return torch.where(batch.stale[batch.sequence], batch.sampler_logprobs, old_logprobs)


def _output(policy: Scorer, micro: TokenBatch, pack: Pack) -> PolicyOutput:
    """Return what a policy says of a micro-batch, among the tokens that its sampler left possible."""
    return policy(pack, micro.token_ids, micro.temperature, micro.kept)


def _idle_micro_batch(like: TokenBatch) -> tuple[TokenBatch, Pack]:
    """Return one prompt token and one completion token: the cheapest forward that touches every weight."""
    one, token = torch.ones(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    nothing = like.select(torch.zeros(0, dtype=torch.long))
    micro = replace(
        nothing,
        prompt_ids=token,
        prompt_lengths=one,
        group=token,
        token_ids=token,
        lengths=one,
        sampler_logprobs=torch.zeros(1),
        rewards=torch.zeros(1),
        scores=torch.zeros(1, nothing.scores.shape[1]),
        domain=token,
        weight_version=token,
        advantages=torch.zeros(1),
        weights=torch.zeros(1),
        old_logprobs=None,
        reference_logprobs=None,
        old_entropy=None,
        selected=None,
        truncated=None,
        masked=None,
        sample=None,
        stale=None,
        own=None,
        prompt=None,
        shadow_advantages=None,
        shadow_weights=None,
        kept_ids=None,
        kept_counts=None,
        versions=None,
    )
    return pack_rows(micro, plan_micro_batches(micro, 2, share_prefix=False)[0])
