"""Micro-batches are counted as the planner makes them, of prompts and answers at their limit."""

import pytest

from grpo_lit.batch import TokenBatch
from grpo_lit.dry_run.workload import Workload
from grpo_lit.policy.packing import plan_micro_batches
from grpo_lit.rollout import Completion, Group, Prompt


def batch(workload: Workload, groups: int) -> TokenBatch:
    tokens = (1,) * workload.completion_tokens
    sample = Completion(tokens, (0.0,) * len(tokens), "", "length", 0)
    samples, rewards = (sample,) * workload.completions, [0.0] * workload.completions
    prompts = [Prompt(str(n), "", token_ids=(1,) * workload.prompt_tokens) for n in range(groups)]
    return TokenBatch.from_groups([Group(prompt, 0, samples, rewards=rewards) for prompt in prompts], 1.0)


# A group of 4 answers of 10 tokens to a prompt of 20 is 20 + 4 * 9 = 56 tokens, a sequence alone 29.
@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("budget", [1000, 120, 60, 47, 29, 10])
@pytest.mark.parametrize("world_size", [1, 2])
def test_counts_are_the_planners(share_prefix: bool, budget: int, world_size: int) -> None:
    workload = Workload(7, 4, 20, 10, budget, share_prefix)
    groups = -(-7 // world_size)
    plan = plan_micro_batches(batch(workload, groups), budget, share_prefix)
    assert workload.micro_batches(world_size) == len(plan)
    assert workload.tokens == 280
    pack = workload.largest_pack()
    largest = max(len(rows) * max(sum(unit.size for unit in row) for row in rows) for rows in plan)
    assert largest <= pack.input_ids.numel() <= max(budget, 29)
