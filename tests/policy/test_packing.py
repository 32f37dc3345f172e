"""Packs: what a transformer sees, and that nothing computed from it depends on how sequences were laid out."""

import pytest
import torch

from grpo_lit.batch import TokenBatch
from grpo_lit.policy.attention import Layout
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
    # First unit: prompt 1 2 3, inputs of the completions without their last token: 10 | 12 13 | nothing. Second unit:
    # prompt 4 5, completions 20 and 21 22 need the inputs nothing and 21.
    assert pack.input_ids.tolist() == [[1, 2, 3, 10, 12, 13, 4, 5, 21]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 3, 3, 4, 0, 1, 2]]
    # 10 and 12 are predicted from the prompt's last token (column 2), 11 from 10 (3), 13 from 12 (4), 14 from 13 (5);
    # 20 and 21 from column 7, 22 from column 8.
    assert pack.predictor.tolist() == [2, 3, 2, 4, 5, 7, 7, 8]
    assert micro.token_ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 22]


def layout_of(batch: TokenBatch, masks: bool) -> Layout:
    (rows,) = plan_micro_batches(batch, budget=100, share_prefix=True)
    layout = pack_rows(batch, rows, masks)[1].layout
    assert layout is not None
    return layout


def test_the_layout_names_the_columns_of_each_sequence() -> None:
    layout = layout_of(make_batch(EXAMPLE), masks=False)
    # 1 2 3 12 13, then 1 2 3 10, then 4 5 21, each of another class of lengths. The empty completion and the one of one
    # token need no row: their prompts have one.
    assert [table.keys.tolist() for table in layout.tables] == [[[0, 1, 2, 4, 5]], [[0, 1, 2, 3]], [[6, 7, 8]]]
    assert all(table.queries is table.keys and table.mask is None for table in layout.tables)
    # The prompt is read off the first row, 12 13 too, 10 off the second (5 + 3), the rest follows at 9.
    assert layout.source.tolist() == [0, 1, 2, 8, 3, 4, 9, 10, 11]


def test_under_masks_prompts_attend_once_and_completions_alone() -> None:
    # Inputs 10 11 12 (columns 3 to 5) and 13 14 15 16 (6 to 9) behind 1 2 3, then 4 5 with 21 (12).
    batch = make_batch([([1, 2, 3], [[10, 11, 12, 0], [13, 14, 15, 16, 0]]), ([4, 5], [[20], [21, 0]])])
    layout = layout_of(batch, masks=True)
    causal, masked = ([t for t in layout.tables if (t.mask is None) == yes] for yes in (True, False))
    assert [table.keys.tolist() for table in causal] == [[[0, 1, 2]], [[10, 11]]]
    shapes = [(table.keys.tolist(), table.queries.tolist()) for table in masked]
    assert shapes == [
        ([[0, 1, 2, 3, 4, 5]], [[3, 4, 5]]),
        ([[0, 1, 2, 6, 7, 8, 9]], [[6, 7, 8, 9]]),
        ([[10, 11, 12]], [[12]]),
    ]
    assert [table.mask[0, 0].int().tolist() for table in masked[:1]] == [
        [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]
    ]
    # Prompts at 0 and 3, then 5, 8 and 12: in the order of the tables.
    assert layout.source.tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 10, 11, 3, 4, 12]


def test_rows_of_about_equal_length_share_a_table_and_padding_sees_something() -> None:
    batch = make_batch([([1, 2, 3], [[10] * 9, [11] * 10])])  # 8 and 9 inputs: columns 3 to 10 and 11 to 19
    (table,) = (table for table in layout_of(batch, masks=True).tables if table.mask is not None)
    assert table.keys.tolist() == [[0, 1, 2, *range(3, 11), 0], [0, 1, 2, *range(11, 20)]]
    assert table.queries.tolist() == [[*range(3, 11), 0], list(range(11, 20))]
    assert table.mask.any(-1).all()
    assert table.mask[0, 0, 7].tolist() == [True] * 11 + [False]  # the last input does not see the padding


def test_a_prompt_whose_completions_need_no_inputs_has_a_row() -> None:
    batch = make_batch([([1, 2, 3], [[10], []]), ([4, 5], [[20], [21, 22]])])
    layout = layout_of(batch, masks=False)
    assert sorted(row for table in layout.tables for row in table.keys.tolist()) == [[0, 1, 2], [3, 4, 5]]
    assert sorted(layout.source.tolist()) == [0, 1, 2, 3, 4, 5]


def test_micro_batches_are_as_few_as_the_budget_allows_and_about_equal() -> None:
    batch = make_batch([([1], [[5] * k]) for k in (9, 8, 7, 6, 5, 5, 5, 5)])  # as many inputs: 50 in all
    plan = plan_micro_batches(batch, budget=30, share_prefix=True)
    # First fit would leave 29 and 21.
    assert [sum(unit.size for unit in rows[0]) for rows in plan] == [25, 25]


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
