"""The exact expectation and variance of a recipe's gradient, over every group that could be drawn.

    E[g] = sum_m P(m) g(m)      tr Cov[g] = sum_m P(m) |g(m)|^2 - |E[g]|^2

m runs over all multisets of G completions (a recipe does not see their order), P(m) is multinomial. g(m) is minus the
gradient of the real ``Objective`` on a real ``TokenBatch``, one group being one optimizer step.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_lit.batch import TokenBatch
from grpo_lit.errors import ConfigError
from grpo_lit.lab.world import Policies, World, entropy_of
from grpo_lit.objectives import Counts, Objective
from grpo_lit.shapes import SequenceInt

#: More steps than this take minutes and gigabytes.
MAX_STEPS = 60_000


@dataclass(frozen=True)
class Steps:
    """M optimizer steps and how likely each is.

    Attributes:
        world: Prompts and completions.
        policies: Who is trained, who drew, who is old, who is the reference.
        batch: All steps one after the other, each of whole groups.
        step: Step of each group.
        probability: Of each step.
    """

    world: World
    policies: Policies
    batch: TokenBatch
    step: Int[Tensor, "N"]
    probability: Float[Tensor, "M"]

    @cached_property
    def members(self) -> tuple[SequenceInt, ...]:
        """Return the sequences of each step."""
        sizes = torch.bincount(self.step[self.batch.group], minlength=len(self.probability))
        return torch.arange(len(self.batch.group)).split(sizes.tolist())

    def prepared(self, objective: Objective) -> "Steps":
        """Return the steps as the learner sees them, each treated alone: advantages, filters, selection, weights.

        Steps that look the same to the objective's parts are treated once.
        """
        # What reads tokens meets no two steps alike: each is its own.
        keys: Iterable[bytes | int] = range(len(self.members)) if _reads_tokens(objective) else self._looks
        known: dict[bytes | int, TokenBatch] = {}
        ready = []
        for key, sequences in zip(keys, self.members, strict=True):
            if key not in known:
                # The tag tells afterwards which sequences the filters kept.
                tag = torch.arange(len(sequences))
                known[key] = prepare(objective, replace(self.batch.select(sequences), weight_version=tag))
            ready.append((sequences, known[key]))
        kept = torch.cat([sequences[batch.weight_version] for sequences, batch in ready])
        added: dict[str, Any] = {
            name: torch.cat([getattr(batch, name) for _, batch in ready])
            for name in ("advantages", "weights", "selected")
            if getattr(ready[0][1], name) is not None
        }
        batch = replace(self.batch.select(kept), **added)
        return replace(self, batch=batch, step=self.step[self.batch.group[kept].unique()])

    @cached_property
    def _looks(self) -> list[bytes]:
        """Return for each step all that a part may read of it before the loss, but for its tokens."""
        batch, truncated = self.batch, cast("Tensor", self.batch.truncated)
        per_sequence = [batch.group - batch.group[self._first], batch.lengths, batch.rewards, truncated, batch.domain]
        table = torch.cat([torch.stack(per_sequence, -1).double(), batch.scores], -1)
        return [piece.numpy().tobytes() for piece in table.split([len(m) for m in self.members])]

    @property
    def _first(self) -> SequenceInt:
        """First sequence of each sequence's step."""
        return torch.cat([members[:1].expand(len(members)) for members in self.members])


def prepare(objective: Objective, batch: TokenBatch) -> TokenBatch:
    """Return one optimizer step with advantages and weights, without the sequences that the filters drop."""
    batch = objective.filtered(replace(batch, advantages=objective.advantages(batch, _one_process)))
    batch = replace(batch, selected=objective.selected(batch, _one_process))
    return replace(batch, weights=objective.weights(batch, Counts.of(batch, _one_process)))


def _reads_tokens(objective: Objective) -> bool:
    """Return whether advantages, filters, selection or weights may look at tokens or log-probs.

    The library's own parts look at rewards, scores, lengths, truncation and domains, but for those asked here. What a
    part from elsewhere looks at is not known.
    """
    parts = (objective.advantage, objective.reduction, *objective.filters)
    foreign = any(not type(part).__module__.startswith("grpo_lit.") for part in parts)
    return foreign or objective.needs_old_entropy or objective.needs_reference_before_advantages


@dataclass(frozen=True)
class Estimate:
    """Exact moments of a gradient estimator.

    Attributes:
        mean: E[g], flat over the C V logits.
        variance: tr Cov[g].
    """

    mean: Float[Tensor, "D"]
    variance: float


def multisets(world: World, sampler: Float[Tensor, "C V"], size: int) -> tuple[Tensor, Tensor]:
    """Return all multisets of ``size`` completions [M G] and their probability under each prompt [X M].

    P(m) = G! / prod_y k_y!  prod_y pi(y)^k_y      k_y: how often y is in m
    """
    number = math.comb(len(world.completions) + size - 1, size)
    if number * world.prompts > MAX_STEPS:
        raise ConfigError(
            f"`group_size` {size} expected to give at most {MAX_STEPS} groups, but got {number * world.prompts}: "
            "lower it, or the vocabulary, the length, or the prompts"
        )
    members = torch.tensor(list(itertools.combinations_with_replacement(range(len(world.completions)), size)))
    times = torch.zeros(len(members), len(world.completions), dtype=torch.float64)
    times.scatter_add_(1, members, torch.ones_like(members, dtype=torch.float64))
    log_orders = math.lgamma(size + 1) - torch.lgamma(times + 1).sum(-1)
    return members, (log_orders + world.completion_logprobs(sampler)[:, members].sum(-1)).exp()


def has_signal(rewards: Float[Tensor, "N G"]) -> Bool[Tensor, "N"]:
    """Return which groups dynamic sampling keeps: those whose rewards vary."""
    return rewards.amax(-1) > rewards.amin(-1)


def single_group_steps(world: World, policies: Policies, size: int, dynamic_sampling: bool = False) -> Steps:
    """Return every step of one group of a prompt drawn at random.

    Args:
        world: Prompts and completions.
        policies: Who draws, and against whom the loss is taken.
        size: G.
        dynamic_sampling: A group without signal is replaced by a group of a newly drawn prompt, until one has signal:
            the same as conditioning on signal.
    """
    members, probability = multisets(world, policies.sampler, size)
    prompt = torch.repeat_interleave(torch.arange(world.prompts), len(members))
    members, probability = members.repeat(world.prompts, 1), probability.flatten() / world.prompts
    if dynamic_sampling:
        keep = has_signal(world.rewards[prompt[:, None], members])
        prompt, members, probability = prompt[keep], members[keep], probability[keep] / probability[keep].sum()
    return Steps(world, policies, world.batch(prompt, members, policies), torch.arange(len(prompt)), probability)


def step_gradients(objective: Objective, steps: Steps) -> Float[Tensor, "M D"]:
    """Return minus the gradient of the loss of every step with respect to the logits.

    Advantages, filters, selections and weights are asked for step by step, since they may use counts and statistics of
    a whole step. The loss is a sum over sequences, so one call and one backward to the log-probs serve all steps; the
    rest is the chain rule of a softmax: with D = dloss/dlogp and E = dloss/dH summed over the tokens of a step in a
    context,

        dloss/dlogit_v = D_v - p_v sum_u D_u - E p_v (log p_v + H)
    """
    world, ready = steps.world, steps.prepared(objective)
    batch, table = ready.batch, steps.policies.current.log_softmax(-1)
    probs, table_entropy = table.exp(), entropy_of(table)
    contexts = world.token_contexts(batch.prompt_ids[batch.group], batch.token_ids, batch.lengths)
    logprobs = table[contexts, batch.token_ids].requires_grad_()
    entropy = table_entropy[contexts].requires_grad_()
    loss = objective.loss(batch, logprobs, entropy).loss
    by_logprob, by_entropy = torch.autograd.grad(loss, (logprobs, entropy), allow_unused=True, materialize_grads=True)
    cell = ready.step[batch.group][batch.sequence] * world.contexts + contexts
    cells = len(steps.probability) * world.contexts
    inner = table.new_zeros(cells * world.vocabulary)
    inner = inner.index_add(0, cell * world.vocabulary + batch.token_ids, by_logprob)
    inner = inner.view(-1, world.contexts, world.vocabulary)
    inner = inner - probs * inner.sum(-1, keepdim=True)
    pull = table.new_zeros(cells).index_add(0, cell, by_entropy).view(-1, world.contexts, 1)
    inner = inner - pull * probs * (table + table_entropy[:, None])
    return -inner.flatten(1)


def estimate(objective: Objective, steps: Steps) -> Estimate:
    """Return the exact mean and variance of a recipe's gradient estimator; see :func:`step_gradients`."""
    gradients = step_gradients(objective, steps)
    mean = steps.probability @ gradients
    return Estimate(mean, float(steps.probability @ (gradients - mean).square().sum(-1)))


def _one_process(values: Tensor) -> Tensor:
    return values
