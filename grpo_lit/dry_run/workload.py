"""Optimizer steps as large as a configuration lets them get: every prompt and every answer at its limit."""

import math
from dataclasses import dataclass

from grpo_lit.batch import TokenBatch
from grpo_lit.policy.packing import Pack, pack_rows, plan_micro_batches
from grpo_lit.rollout import Completion, Group, Prompt


@dataclass(frozen=True)
class Workload:
    """What an optimizer step is made of, over all ranks.

    Attributes:
        prompts: Groups of a step.
        completions: Of each.
        prompt_tokens: Of each prompt.
        completion_tokens: Of each completion.
        budget: Most input tokens of a micro-batch.
        share_prefix: One copy of a prompt for its completions.
        updates: Steps that a rollout is cut into.
    """

    prompts: int
    completions: int
    prompt_tokens: int
    completion_tokens: int
    budget: int
    share_prefix: bool
    updates: int = 1

    @property
    def tokens(self) -> int:
        """Completion tokens of a step, over all ranks."""
        return self.prompts * self.completions * self.completion_tokens

    def sampled_at_once(self, world_size: int, batch_size: int) -> int:
        """Return how many sequences of a rollout the engine of a rank draws at a time, at most."""
        return min(math.ceil(self.prompts * self.updates / world_size) * self.completions, batch_size)

    def micro_batches(self, world_size: int) -> int:
        """Return the forward and backward passes of each rank, of which all have as many as the busiest."""
        groups, inputs = math.ceil(self.prompts / world_size), max(self.completion_tokens - 1, 0)
        if not self.share_prefix:
            rows = max(self.budget // (self.prompt_tokens + inputs), 1)
            return math.ceil(groups * self.completions / rows)
        whole = self.prompt_tokens + self.completions * inputs
        if whole <= self.budget:
            return math.ceil(groups / (self.budget // whole))
        per_unit = max((self.budget - self.prompt_tokens) // max(inputs, 1), 1)
        return groups * math.ceil(self.completions / per_unit)

    def largest_pack(self) -> Pack:
        """Return a micro-batch that the budget is full with, or the whole of a step that is smaller."""
        inputs = max(self.completion_tokens - 1, 0)
        if self.share_prefix:
            groups = self.budget // (self.prompt_tokens + self.completions * inputs)
        else:
            groups = math.ceil(self.budget / (self.prompt_tokens + inputs) / self.completions)
        groups = min(max(groups, 1), self.prompts)
        samples = self.completions
        if groups == 1:
            samples = max((self.budget - self.prompt_tokens) // max(inputs, 1), 1)
        tokens = (1,) * self.completion_tokens
        completion = Completion(tokens, (0.0,) * len(tokens), text="", finish_reason="length", weight_version=0)
        asked = [Prompt(str(n), question="", token_ids=(1,) * self.prompt_tokens) for n in range(groups)]
        members = min(samples, self.completions)
        batch = TokenBatch.from_groups(
            [Group(prompt, 0, (completion,) * members, rewards=[0.0] * members) for prompt in asked], temperature=1.0
        )
        plan = plan_micro_batches(batch, self.budget, self.share_prefix)
        _, pack = pack_rows(batch, max(plan, key=lambda rows: sum(unit.size for row in rows for unit in row)))
        return pack
