"""A rollout on its way through the learner: its groups, its tensors, and the optimizer steps made on it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from grpo_lit.batch import TokenBatch
from grpo_lit.metrics.rates import Rates
from grpo_lit.rollout import Group
from grpo_lit.shapes import SequenceInt


@dataclass
class Rollout:
    """Scored groups of this rank, and the sequences of every optimizer step that will be made on them.

    Attributes:
        groups: The scored groups.
        batch: Their tokens; the learner fills in advantages and, where needed, old log-probs.
        updates: Sequences of each optimizer step.
        rates: What to log of it, this rank's share.
        seconds: Wall time of each phase that made it.
        memory: Peak memory of this process while it was made [GiB].
    """

    groups: Sequence[Group]
    batch: TokenBatch
    updates: list[SequenceInt]
    rates: Rates = field(default_factory=Rates)
    seconds: dict[str, float] = field(default_factory=dict)
    memory: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs to go on in the middle of a rollout; plain types and tensors only."""
        return {
            "groups": [group.state_dict() for group in self.groups],
            "updates": self.updates,
            "advantages": self.batch.advantages,
            "old_logprobs": self.batch.old_logprobs,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], temperature: float, score_names: Sequence[str]) -> "Rollout":
        """Rebuild a rollout written by :meth:`state_dict`."""
        groups = [Group.from_state_dict(group) for group in state["groups"]]
        batch = TokenBatch.from_groups(groups, temperature, score_names)
        batch = replace(batch, advantages=state["advantages"], old_logprobs=state["old_logprobs"])
        return cls(groups, batch, state["updates"])


@dataclass(frozen=True)
class Minibatch:
    """One optimizer step's share of a rollout.

    Attributes:
        rollout: Where its sequences come from.
        update: Which of ``rollout.updates`` this is; 0 is the first.
    """

    rollout: Rollout
    update: int


def plan_updates(batch: TokenBatch, num_updates: int, num_epochs: int, seed: int) -> list[SequenceInt]:
    """Return the sequences of each of ``num_epochs * num_updates`` optimizer steps on a rollout.

    Each epoch is a new permutation of the groups, cut into ``num_updates`` parts that differ by one group at most.
    A group is never cut: its sequences share a prompt, and reductions may count by group.
    """
    generator = torch.Generator().manual_seed(seed)
    updates = []
    for _ in range(num_epochs):
        groups = len(batch.prompt_lengths)
        order = torch.randperm(groups, generator=generator) if num_updates > 1 else torch.arange(groups)
        updates += [torch.isin(batch.group, part).nonzero()[:, 0] for part in order.tensor_split(num_updates)]
    return updates
