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


# Groups that are split, whose last parts share micro-batches. A prompt of 512 and 8 answers of 255 inputs: 6 go into
# 2048 (2042), and 2 with their prompt are 1022, of which two go together (2044). With 16 answers, a prompt of 128 and
# 4096: 15 go (3953), and ten last parts of 383 together (3830).
@pytest.mark.parametrize(
    ("workload", "count", "width"),
    [
        (Workload(32, 8, 512, 256, 2048, share_prefix=True), 32 + 16, 2044),
        (Workload(32, 16, 128, 256, 4096, share_prefix=True), 32 + 4, 3953),
    ],
)
def test_last_parts_of_split_groups_share_micro_batches(workload: Workload, count: int, width: int) -> None:
    assert workload.micro_batches(world_size=1) == count
    assert len(plan_micro_batches(batch(workload, 32), workload.budget, share_prefix=True)) == count
    assert workload.micro_batches(world_size=2) == count // 2
    assert workload.largest_pack().input_ids.shape == (1, width)


def test_a_step_of_many_tokens_is_counted_without_them() -> None:
    # 8192 sequences of 32768 tokens would be gigabytes; each is a micro-batch of its own.
    assert Workload(512, 16, 1024, 32768, budget=34000, share_prefix=True).micro_batches(1) == 8192
