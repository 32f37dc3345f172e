"""A rollout on its way through the learner: its groups, its tensors, and the optimizer steps made on it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from grpo_lit.batch import SumRanks, TokenBatch
from grpo_lit.metrics.rates import Rates
from grpo_lit.rollout import Group
from grpo_lit.shapes import SequenceInt


@dataclass(frozen=True)
class UpdatePlan:
    """How many optimizer steps a rollout gets, and what decides their groups.

    Attributes:
        num_updates: Parts an epoch is cut into.
        num_epochs: Passes over the rollout.
        seed: Of the permutation of prompts.
        prompts: How many the rollout asks over all ranks; ``None``: those of the batch, on one rank.
    """

    num_updates: int = 1
    num_epochs: int = 1
    seed: int = 0
    prompts: int | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        return self.num_updates * self.num_epochs

    def sequences(self, batch: TokenBatch, sum_ranks: SumRanks = lambda values: values) -> list[SequenceInt]:
        """Return this rank's sequences of each optimizer step; all ranks must call.

        Each epoch is a new permutation of the prompts of all ranks, cut into ``num_updates`` parts that differ by one
        at most: the parts do not depend on how prompts are spread over ranks. The completions of a prompt stay
        together: they share it, and reductions may count by group.

        Args:
            batch: This rank's share of the rollout; a prompt without sequences is on no rank, and in no part.
            sum_ranks: Sums a tensor over all ranks.
        """
        generator = torch.Generator().manual_seed(self.seed)
        prompt = batch.group if batch.prompt is None else batch.prompt
        asked = torch.zeros(self.prompts or len(batch.prompt_lengths))
        prompts, updates = sum_ranks(asked.index_fill(0, prompt, 1.0)).nonzero()[:, 0], []
        for _ in range(self.num_epochs):
            order = torch.arange(len(prompts))
            if self.num_updates > 1:
                order = torch.randperm(len(prompts), generator=generator)
            parts = prompts[order].tensor_split(self.num_updates)
            updates += [torch.isin(prompt, part).nonzero()[:, 0] for part in parts]
        return updates


@dataclass
class Rollout:
    """Scored groups of this rank, and the optimizer steps that will be made on them.

    Attributes:
        groups: The scored groups.
        batch: Their tokens; the learner fills in advantages and, where needed, old log-probs.
        plan: How many optimizer steps.
        updates: Sequences of each of them, set with the advantages.
        rates: What to log of it, this rank's share.
        seconds: Wall time of each phase that made it.
        memory: Peak memory of this process while it was made [GiB].
        tokens: Completion tokens drawn for it over all ranks.
    """

    groups: Sequence[Group]
    batch: TokenBatch
    plan: UpdatePlan
    updates: list[Int[Tensor, "..."]] = field(default_factory=list)
    rates: Rates = field(default_factory=Rates)
    seconds: dict[str, float] = field(default_factory=dict)
    memory: float = 0.0
    tokens: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to go on in the middle of a rollout; plain types and tensors only."""
        return {"batch": dict(vars(self.batch)), "plan": dict(vars(self.plan)), "updates": self.updates}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Rollout":
        """Rebuild what is left to train on of a rollout written by :meth:`state_dict`."""
        return cls((), TokenBatch(**state["batch"]), UpdatePlan(**state["plan"]), state["updates"])


class Minibatch:
    """One optimizer step's share of a rollout.

    No dataclass: Lightning copies those, and its ``bf16-true`` casts every tensor that it finds in them.

    Args:
        rollout: Where its sequences come from.
        update: Which of ``rollout.updates`` this is; 0 is the first.
    """

    def __init__(self, rollout: Rollout, update: int) -> None:
        self.rollout, self.update = rollout, update
