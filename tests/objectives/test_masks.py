import pytest
import torch

from grpo_lit.errors import ConfigError
from grpo_lit.objectives import OverlongFilter, TopEntropy, ZeroSignalFilter
from grpo_lit.objectives.masks import top_share_threshold


def test_overlong_filter_keeps_what_ended_by_itself(make_batch):
    batch = make_batch([1, 0, 1], truncated=torch.tensor([False, True, False]))
    assert OverlongFilter()(batch).tolist() == [True, False, True]


def test_overlong_filter_asks_for_flags(make_batch):
    with pytest.raises(ValueError, match=r"batch\.truncated"):
        OverlongFilter()(make_batch([1.0]))


def test_zero_signal_filter_keeps_what_moves(make_batch):
    batch = make_batch([1, 0, 1], advantages=torch.tensor([0.5, 0.0, -0.5]))
    assert ZeroSignalFilter()(batch).tolist() == [True, False, True]


def entropies(make_batch, values, lengths=None):
    return make_batch([0.0], lengths=lengths or [len(values)], old_entropy=torch.tensor(values))


def test_top_entropy_by_hand(make_batch, alone):
    # Ten tokens with entropies 0 .. .9: the top fifth are .8 and .9.
    batch = entropies(make_batch, [i / 10 for i in range(10)])
    assert TopEntropy(0.2)(batch, alone).nonzero().flatten().tolist() == [8, 9]
    assert TopEntropy(1.0)(batch, alone).all()
    # 15 % of ten tokens is one and a half: at least that, so two.
    assert TopEntropy(0.15)(batch, alone).sum() == 2


def test_equal_entropies_stand_or_fall_together(make_batch, alone):
    assert TopEntropy(0.5)(entropies(make_batch, [0.3] * 4), alone).all()
    assert TopEntropy(0.5)(entropies(make_batch, [0.0] * 4), alone).all()


def test_one_threshold_for_all_ranks(make_batch, alone, on_ranks):
    values = torch.rand(101, generator=torch.Generator().manual_seed(0)) ** 4 * 3
    whole = TopEntropy(0.2)(entropies(make_batch, values.tolist()), alone)
    assert whole.sum() == 21
    shares = [entropies(make_batch, share.tolist()) for share in values.split([40, 61])]
    torch.testing.assert_close(torch.cat(on_ranks(TopEntropy(0.2), shares)), whole)


def test_the_threshold_does_not_depend_on_order(alone):
    values = torch.tensor([0.5, 0.1, 0.9, 0.3])
    assert top_share_threshold(values, 0.5, alone) == top_share_threshold(values.flip(0), 0.5, alone)


def test_no_tokens_select_none(make_batch, alone):
    assert TopEntropy()(entropies(make_batch, [], lengths=[0]), alone).tolist() == []


def test_top_entropy_asks_for_entropies_and_a_share(make_batch, alone):
    with pytest.raises(ValueError, match=r"batch\.old_entropy"):
        TopEntropy()(make_batch([0.0]), alone)
    for share in (0.0, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="`share` of TopEntropy"):
            TopEntropy(share)
