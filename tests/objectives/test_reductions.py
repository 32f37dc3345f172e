from dataclasses import replace

import pytest
import torch

from grpo_lit.errors import ConfigError
from grpo_lit.objectives import ConstantLength, Counts, GroupTokenMean, SequenceMean, TokenMean

PARTS = [SequenceMean(), TokenMean(), GroupTokenMean(), ConstantLength(8)]


@pytest.fixture
def batch(make_batch, dtype):
    # Lengths 1 3 | 4 in groups 0 0 | 1.
    return make_batch([1, 0, 1], group=[0, 0, 1], lengths=[1, 3, 4], dtype=dtype)


def test_weights_by_hand(batch, alone, dtype):
    counts = Counts.of(batch, alone)
    assert counts == Counts(sequences=3, tokens=8, groups=2)
    for part, expected in (
        (SequenceMean(), [1 / 3, 1 / 9, 1 / 12]),
        (TokenMean(), [1 / 8] * 3),
        (GroupTokenMean(), [1 / 8] * 3),  # 1 / (2 groups * 4 tokens) in both
        (ConstantLength(8), [1 / 24] * 3),
    ):
        torch.testing.assert_close(part(batch, counts), torch.tensor(expected, dtype=dtype))


def test_weights_come_from_the_counts_of_all_ranks(batch, dtype):
    # The other ranks hold as much again: every weight is half of what this rank alone would give.
    for part in PARTS:
        mine, all_ranks = part(batch, Counts(3, 8, 2)), part(batch, Counts(6, 16, 4))
        torch.testing.assert_close(all_ranks, mine / 2)


def test_group_token_mean_gives_each_group_the_same_say(make_batch, alone):
    # Groups of 1 + 1 and 6 tokens: every group sums to 1/2 over its tokens.
    batch = make_batch([0, 0, 0], group=[0, 0, 1], lengths=[1, 1, 6])
    weights = GroupTokenMean()(batch, Counts.of(batch, alone))
    torch.testing.assert_close(weights, torch.tensor([1 / 4, 1 / 4, 1 / 12]))


@pytest.mark.parametrize("part", PARTS[:3], ids=repr)
def test_a_constant_loss_of_one_per_token_averages_to_one(batch, alone, part):
    weights = part(batch, Counts.of(batch, alone))
    assert (weights * batch.lengths).sum().item() == pytest.approx(1.0)


def test_token_mean_of_unequal_completions_is_not_a_mean_of_means(make_batch, alone):
    # Field bug A3. Losses 10 on 1 token and 1 on 9: 19 / 10 = 1.9, where the mean of micro-batch means is 5.5.
    batch = make_batch([0, 0], lengths=[1, 9])
    weights = TokenMean()(batch, Counts.of(batch, alone))
    per_token = torch.tensor([10.0] + [1.0] * 9)
    assert (weights[batch.sequence] * per_token).sum().item() == pytest.approx(1.9)
    halves = [batch.select(torch.tensor([i])) for i in (0, 1)]
    again = sum(
        (part.weights[part.sequence] * losses).sum()
        for part, losses in zip(_with(halves, weights), per_token.split([1, 9]), strict=True)
    )
    assert again.item() == pytest.approx(1.9)


def _with(batches, weights):
    return [replace(batch, weights=weights[i : i + 1]) for i, batch in enumerate(batches)]


def test_constant_length_knows_nothing_of_the_width_at_hand(make_batch, alone):
    # Field bug A3: not by the padded width of the batch at hand.
    for lengths in ([1, 2], [1, 7]):
        batch = make_batch([0, 0], lengths=lengths)
        assert ConstantLength(10)(batch, Counts.of(batch, alone)).tolist() == pytest.approx([0.05, 0.05])


@pytest.mark.parametrize("part", PARTS, ids=repr)
def test_nothing_and_empty_completions_have_finite_weights(make_batch, alone, part):
    for lengths in ([], [0, 0], [0, 3]):
        batch = make_batch([0.0] * len(lengths), lengths=lengths)
        assert torch.isfinite(part(batch, Counts.of(batch, alone))).all()


def test_counts_add_up_over_ranks_and_skip_groups_without_tokens(make_batch):
    batch = make_batch([0, 0, 0], group=[0, 1, 1], lengths=[0, 2, 3])
    other = torch.tensor([5, 40, 2])
    assert Counts.of(batch, lambda x: x + other) == Counts(sequences=8, tokens=45, groups=3)


def test_constant_length_refuses_to_divide_by_nothing():
    with pytest.raises(ConfigError, match=r"`length` of ConstantLength.*0"):
        ConstantLength(0)
