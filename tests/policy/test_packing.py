"""Packs: what a transformer sees, and that nothing computed from it depends on how sequences were laid out."""

import pytest
import torch

from grpo_lit.batch import TokenBatch
from grpo_lit.policy.packing import pack_rows, plan_micro_batches
from grpo_lit.rollout import Completion, Group, Prompt


def make_batch(groups: list[tuple[list[int], list[list[int]]]]) -> TokenBatch:
    built = []
    for n, (prompt, completions) in enumerate(groups):
        samples = tuple(Completion(tuple(c), (-1.0,) * len(c), "", "stop", 0) for c in completions)
        rewards = [float(i % 2) for i in range(len(samples))]
        built.append(Group(Prompt(id=str(n), question="", token_ids=tuple(prompt)), 0, samples, rewards=rewards))
    return TokenBatch.from_groups(built, temperature=1.0)


EXAMPLE = [([1, 2, 3], [[10, 11], [12, 13, 14], []]), ([4, 5], [[20], [21, 22]])]


def test_a_pack_holds_each_prompt_once_and_continues_its_positions() -> None:
    batch = make_batch(EXAMPLE)
    (rows,) = plan_micro_batches(batch, budget=100, share_prefix=True)
    micro, pack = pack_rows(batch, rows)
    # First unit: prompt 1 2 3, inputs of the completions without their last token: 10 | 12 13 | nothing.
    assert pack.input_ids[0].tolist() == [1, 2, 3, 10, 12, 13]
    assert pack.position_ids[0].tolist() == [0, 1, 2, 3, 3, 4]
    assert pack.branch[0].tolist() == [0, 0, 0, 1, 2, 2]
    # Second unit: prompt 4 5, completions 20 and 21 22 need the inputs nothing and 21; two columns of padding... of 6.
    assert pack.input_ids[1].tolist() == [4, 5, 21, 0, 0, 0]
    assert pack.branch[1].tolist() == [0, 0, 2, -1, -1, -1]
    # 10 and 12 are predicted from the prompt's last token (column 2), 11 from 10 (3), 13 from 12 (4), 14 from 13 (5);
    # in the second row 20 and 21 from column 1, 22 from column 2.
    assert pack.predictor.tolist() == [2, 3, 2, 4, 5, 6 + 1, 6 + 1, 6 + 2]
    assert micro.token_ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 22]


def test_the_mask_shows_prompt_and_self_only() -> None:
    batch = make_batch(EXAMPLE)
    (rows,) = plan_micro_batches(batch, budget=100, share_prefix=True)
    mask = pack_rows(batch, rows)[1].attention_mask()[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0],  # 1
        [1, 1, 0, 0, 0, 0],  # 2
        [1, 1, 1, 0, 0, 0],  # 3
        [1, 1, 1, 1, 0, 0],  # 10
        [1, 1, 1, 0, 1, 0],  # 12 does not see 10
        [1, 1, 1, 0, 1, 1],  # 13
    ]


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("budget", [2, 7, 12, 30, 1000])
def test_every_sequence_is_placed_once_within_the_budget(share_prefix: bool, budget: int) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda low, high: int(torch.randint(low, high, (1,), generator=generator))  # noqa: E731
    groups = [([1] * draw(1, 6), [list(range(draw(0, 9))) for _ in range(draw(1, 6))]) for _ in range(12)]
    batch = make_batch(groups)
    plan = plan_micro_batches(batch, budget, share_prefix)
    placed = [i for rows in plan for row in rows for unit in row for i in unit.sequences]
    assert sorted(placed) == list(range(len(batch.lengths)))
    for rows in plan:
        width = max(sum(unit.size for unit in row) for row in rows)
        lone = len(rows) == 1 and len(rows[0]) == 1 and len(rows[0][0].sequences) == 1
        assert width * len(rows) <= budget or lone


def test_a_group_over_the_budget_is_split_and_its_prompt_repeated() -> None:
    batch = make_batch([([1, 2, 3], [[5] * 4] * 6)])  # whole: 3 + 6 * 3 = 21 tokens
    plan = plan_micro_batches(batch, budget=10, share_prefix=True)
    sizes = [[unit.size for unit in row] for rows in plan for row in rows]
    assert sizes == [[9], [9], [9]]  # 3 + 2 * 3
