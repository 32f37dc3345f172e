"""Optimizer steps as large as a configuration lets them get: every prompt and every answer at its limit."""

import math
from dataclasses import dataclass, replace

import torch

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
        count = math.ceil(self.prompts / world_size)
        # The planner reads lengths alone: no step's worth of tokens is made for it.
        batch = _batch(count, self.completions, prompt_tokens=1, completion_tokens=1)
        lengths = torch.full_like(batch.lengths, self.completion_tokens)
        batch = replace(
            batch, prompt_lengths=torch.full_like(batch.prompt_lengths, self.prompt_tokens), lengths=lengths
        )
        return len(plan_micro_batches(batch, self.budget, self.share_prefix))

    def largest_pack(self) -> Pack:
        """Return a micro-batch that the budget is full with, or the whole of a step that is smaller."""
        inputs = max(self.completion_tokens - 1, 0)
        whole, alone = self.prompt_tokens + self.completions * inputs, self.prompt_tokens + inputs
        samples = self.completions
        if not self.share_prefix:
            groups = math.ceil(self.budget / alone / self.completions)
        elif whole <= self.budget:
            groups = self.budget // whole
        else:  # split: one full part, or as many last parts as go together
            groups, samples = 1, max((self.budget - self.prompt_tokens) // max(inputs, 1), 1)
            if rest := self.completions % samples:
                last = self.prompt_tokens + rest * inputs
                together = min(self.budget // last, self.prompts)
                if together * last > self.prompt_tokens + samples * inputs:
                    groups, samples = together, rest
        batch = _batch(min(max(groups, 1), self.prompts), samples, self.prompt_tokens, self.completion_tokens)
        plan = plan_micro_batches(batch, self.budget, self.share_prefix)
        _, pack = pack_rows(batch, max(plan, key=lambda rows: sum(unit.size for row in rows for unit in row)))
        return pack


def _batch(groups: int, completions: int, prompt_tokens: int, completion_tokens: int) -> TokenBatch:
    tokens = (1,) * completion_tokens
    completion = Completion(tokens, (0.0,) * len(tokens), text="", finish_reason="length", weight_version=0)
    samples, rewards = (completion,) * completions, [0.0] * completions
    asked = [Prompt(str(n), question="", token_ids=(1,) * prompt_tokens) for n in range(groups)]
    return TokenBatch.from_groups([Group(prompt, 0, samples, rewards=list(rewards)) for prompt in asked], 1.0)
