import math

import pytest
import torch

from grpo_lit.errors import ConfigError
from grpo_lit.objectives import GDPOAdvantage, GroupAdvantage
from grpo_lit.objectives.advantages import STD_EPS, equal_groups, group_sum

SCALES = ["group_std", "batch_std", "none"]


def test_group_std_by_hand(make_batch, alone, dtype):
    # Field bug A2: which ddof.
    # Rewards 1 0 0 0: mean 1/4, centred 3/4 -1/4 -1/4 -1/4; sample variance (9 + 1 + 1 + 1) / 16 / 3 = 1/4, std 1/2:
    # 0.75 / 0.5001 and -0.25 / 0.5001. With ddof 0 it would be 1.732 and -0.577.
    advantages = GroupAdvantage()(make_batch([1, 0, 0, 0], dtype=dtype), alone)
    expected = torch.tensor([0.75, -0.25, -0.25, -0.25], dtype=dtype) / (0.5 + STD_EPS)
    torch.testing.assert_close(advantages, expected)
    assert advantages[0].item() == pytest.approx(1.5, abs=1e-3)
    assert advantages.dtype == dtype


def test_mean_only_and_leave_one_out_by_hand(make_batch, alone, dtype):
    # Against the others' mean: 1 - 0 = 1 and 0 - 1/3: 4/3 times the difference to the group's mean.
    batch = make_batch([1, 0, 0, 0], dtype=dtype)
    centred = torch.tensor([0.75, -0.25, -0.25, -0.25], dtype=dtype)
    torch.testing.assert_close(GroupAdvantage("none")(batch, alone), centred)
    torch.testing.assert_close(GroupAdvantage("none", leave_one_out=True)(batch, alone), centred * 4 / 3)


def test_batch_std_by_hand(make_batch, alone):
    # Groups 1 0 and 3 0: centred .5 -.5 1.5 -1.5, mean 0, variance (.25 + .25 + 2.25 + 2.25) / 3 = 5/3.
    batch = make_batch([1, 0, 3, 0], group=[0, 0, 1, 1])
    expected = torch.tensor([0.5, -0.5, 1.5, -1.5]) / (math.sqrt(5 / 3) + STD_EPS)
    torch.testing.assert_close(GroupAdvantage("batch_std")(batch, alone), expected)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 0.9, 1e6, -0.35, 0.0])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_equal_rewards_have_advantage_exactly_zero(make_batch, alone, scale, leave_one_out, value, size):
    # Field bug A1.
    # The float32 standard deviation of eight times 0.1 is 8e-9 and their mean is not 0.1: eps of 1e-8 made 0.41 of it.
    advantages = GroupAdvantage(scale, leave_one_out)(make_batch([value] * size), alone)
    assert advantages.tolist() == [0.0] * size


@pytest.mark.parametrize("scale", SCALES)
def test_rewards_equal_up_to_rounding_are_equal(make_batch, alone, scale):
    # Field bug A1. 0.1 + 0.2 differs from 0.3 in the last digit: float64 std 5.6e-17, "std > 0" is true.
    batch = make_batch([0.1 + 0.2, 0.3, 0.3, 0.3], dtype=torch.float64)
    assert GroupAdvantage(scale)(batch, alone).tolist() == [0.0] * 4


@pytest.mark.parametrize("reward", [0.35, 0.3, 0.4])
def test_a_lone_odd_one_out_stays_bounded_with_leave_one_out(make_batch, alone, reward):
    # Field bug A1. Leave-one-out: 0 - reward. Dividing by the others' std, which is 1e-4 of rounding, made -2154 of it.
    batch = make_batch([reward] * 7 + [0.0])
    odd = GroupAdvantage("none", leave_one_out=True)(batch, alone)[-1].item()
    assert odd == pytest.approx(-reward, abs=1e-6)
    # Group std: centred -7r/8 and seven times r/8, variance (49 + 7) r^2 / 64 / 7 = r^2 / 8, so -r / (r / sqrt 8).
    scaled = GroupAdvantage("group_std", leave_one_out=True)(batch, alone)[-1].item()
    assert scaled == pytest.approx(-math.sqrt(8), abs=1e-2)


@pytest.mark.parametrize("scale", SCALES)
def test_a_group_of_one_is_zero_and_never_the_raw_reward(make_batch, alone, scale):
    # Field bug A2.
    batch = make_batch([1.0, 1.0, 0.0], group=[0, 1, 1])
    advantages = GroupAdvantage(scale)(batch, alone)
    assert advantages[0] == 0
    assert torch.isfinite(advantages).all()
    assert advantages[1] > 0 > advantages[2]


def test_groups_of_unequal_size_and_empty_groups(make_batch, alone):
    # Group 0: 2 0 1, mean 1. Group 1 has no sample left. Group 2: 5 3, mean 4. Out of order on purpose.
    batch = make_batch([5, 2, 0, 3, 1], group=[2, 0, 0, 2, 0])
    assert GroupAdvantage("none")(batch, alone).tolist() == [1, 1, -1, -1, 0]


@pytest.mark.parametrize("part", [GroupAdvantage("batch_std"), GDPOAdvantage()])
def test_batch_statistics_are_those_of_all_ranks(make_batch, alone, on_ranks, part):
    # Two ranks with a group each must get what one process with both groups gets: sums meet in a shared total.
    rewards, group = [1.0, 0.0, 3.0, 0.5], [0, 0, 1, 1]
    scores = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0], [0.5, 0.5]])
    whole = part(make_batch(rewards, group, scores=scores), alone)
    ranks = [make_batch(rewards[i : i + 2], scores=scores[i : i + 2]) for i in (0, 2)]
    torch.testing.assert_close(torch.cat(on_ranks(part, ranks)), whole)


def test_gdpo_by_hand(make_batch, alone, dtype):
    # Score a: 1 0, centred .5 -.5, variance .5; score b: 0 4, centred -2 2, variance 8.
    # With weights a 2, b 1: Z_1 = 2 (.5 / (sqrt .5 + eps)) - 2 / (sqrt 8 + eps), Z_2 = -Z_1; std(Z) = |Z_1| sqrt 2.
    scores = torch.tensor([[1.0, 0.0], [0.0, 4.0]], dtype=dtype)
    batch = make_batch([0, 0], dtype=dtype, scores=scores, score_names=("a", "b"))
    z = 2 * 0.5 / (math.sqrt(0.5) + STD_EPS) - 2 / (math.sqrt(8) + STD_EPS)
    expected = torch.tensor([z, -z], dtype=dtype) / (abs(z) * math.sqrt(2) + STD_EPS)
    torch.testing.assert_close(GDPOAdvantage({"a": 2.0})(batch, alone), expected)


def test_gdpo_tells_apart_what_a_sum_of_rewards_confounds(make_batch, alone):
    # Sums 1 1 1 0 are one value thrice; the scores (1, 0), (0, 1), (1, 0), (0, 0) are not.
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    batch = make_batch([1, 1, 1, 0], scores=scores)
    grouped = GroupAdvantage()(batch, alone)
    decoupled = GDPOAdvantage()(batch, alone)
    assert grouped[0] == grouped[1]
    assert decoupled[0] != decoupled[1]


def test_gdpo_abstained_scores_add_nothing(make_batch, alone):
    # Score b speaks for two samples of three: its mean is theirs, and the third gets score a's part alone.
    scores = torch.tensor([[1.0, float("nan")], [0.0, 1.0], [0.0, 0.0]])
    with_b = GDPOAdvantage()(make_batch([0, 0, 0], scores=scores), alone)
    assert torch.isfinite(with_b).all()
    a = torch.tensor([2 / 3, -1 / 3, -1 / 3]) / (math.sqrt(1 / 3) + STD_EPS)
    b = torch.tensor([0.0, 0.5, -0.5]) / (math.sqrt(0.5) + STD_EPS)
    torch.testing.assert_close(with_b, (a + b) / ((a + b).std() + STD_EPS))


def test_gdpo_equal_scores_are_exactly_zero(make_batch, alone):
    scores = torch.tensor([[0.1, 0.7], [0.1, 0.7], [0.1, 0.7], [1.0, 0.0], [0.0, 0.0]])
    advantages = GDPOAdvantage()(make_batch([0] * 5, group=[0, 0, 0, 1, 1], scores=scores), alone)
    assert advantages[:3].tolist() == [0.0] * 3
    assert advantages[3] > 0 > advantages[4]


def test_gdpo_refuses_a_weight_for_an_unknown_reward(make_batch, alone):
    batch = make_batch([0, 0], scores=torch.zeros(2, 1), score_names=("answer",))
    with pytest.raises(ConfigError, match=r"answer.*'fromat'"):
        GDPOAdvantage({"fromat": 1.0})(batch, alone)


def test_group_helpers(make_batch):
    group = torch.tensor([0, 1, 1, 2])
    assert group_sum(torch.tensor([1.0, 2.0, 3.0, 4.0]), group, 4).tolist() == [1.0, 5.0, 4.0, 0.0]
    # One member, two different, one member, none at all.
    assert equal_groups(torch.tensor([1.0, 2.0, 3.0, 4.0]), group, 4).tolist() == [True, False, True, True]
    # A difference of one part in a million is rounding, of one in a thousand a signal.
    pair = torch.tensor([0, 0, 1, 1])
    assert equal_groups(torch.tensor([1.0, 1.0 + 2e-7, 1.0, 1.001]), pair, 2).tolist() == [True, False]


def test_an_empty_rollout_has_no_advantages(make_batch, alone):
    for part in (GroupAdvantage(), GroupAdvantage("batch_std"), GDPOAdvantage()):
        assert part(make_batch([]), alone).tolist() == []
