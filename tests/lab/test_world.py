import pytest
import torch

from grpo_lit.errors import ConfigError
from grpo_lit.lab.world import Policies, World, count_and_stop


def test_every_completion_is_counted_once():
    # 3 tokens, length 3: prefixes 1 + 2 + 4 = 7; each may be stopped (7), and 2^3 = 8 are cut: 15 completions.
    world = World(vocabulary=3, max_length=3)
    assert len(world.prefixes) == 7
    assert len(world.completions) == len(set(world.completions)) == 15
    assert sorted(world.lengths.tolist()) == [1] + [2] * 2 + [3] * 12


def test_probabilities_sum_to_one(world, logits):
    total = world.completion_logprobs(logits).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones(2, dtype=torch.float64), rtol=0, atol=1e-14)


def test_probability_of_one_completion_by_hand(world, logits):
    # Prompt 1 owns contexts 3 (nothing said), 4 (after 1), 5 (after 2): p(2, end | x=1) = p(2 | 3) p(end | 5).
    probs = logits.softmax(-1)
    y = world.completions.index((2, 0))
    got = world.completion_logprobs(logits)[1, y].exp()
    torch.testing.assert_close(got, probs[3, 2] * probs[5, 0], rtol=1e-14, atol=0)


def test_default_task():
    assert count_and_stop(0, (2, 1, 0)) == (1.0, 1.0)
    assert count_and_stop(0, (1, 1, 0)) == (0.0, 1.0)
    assert count_and_stop(1, (1, 1, 0)) == (1.0, 1.0)
    assert count_and_stop(0, (2, 2, 1)) == (0.0, 0.0)


def test_policy_gradient_against_finite_differences(world, logits):
    # Central differences of J are right to O(h^2): h = 1e-5 leaves about 1e-10 of rounding.
    gradient, h = world.policy_gradient(logits), 1e-5
    for cell in range(logits.numel()):
        step = torch.zeros(logits.numel(), dtype=torch.float64)
        step[cell] = h
        up, down = (world.expected_reward(logits + sign * step.view_as(logits)) for sign in (1, -1))
        assert float(gradient.flatten()[cell]) == pytest.approx(float(up - down) / (2 * h), abs=1e-9)


def test_policy_gradient_is_reward_times_score(world, logits, scores_of):
    # grad E[R] = sum_y pi(y) R(y) grad log pi(y): the other way to the same number.
    weight = world.completion_logprobs(logits).exp() * world.rewards
    want = (weight[..., None] * scores_of(world, logits)).sum(1).mean(0)
    torch.testing.assert_close(world.policy_gradient(logits).flatten(), want, rtol=0, atol=1e-15)


def test_batch_holds_what_each_policy_says(world, logits):
    other = world.random_logits(1.0, seed=9)
    members = torch.tensor([[0, 5], [1, 1]])  # completions: (end), (2, 1), (1, end), (1, end)
    batch = world.batch(torch.tensor([0, 1]), members, Policies(logits, sampler=other, old=logits))
    assert batch.token_ids.tolist() == [0, *world.completions[5], 1, 0, 1, 0]
    assert batch.lengths.tolist() == [1, 2, 2, 2]
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.reference_logprobs is None
    assert batch.truncated.tolist() == [False, True, False, False]
    want = [other.log_softmax(-1)[3, 1], other.log_softmax(-1)[4, 0]] * 2  # prompt 1: nothing said, then after 1
    torch.testing.assert_close(batch.sampler_logprobs[3:], torch.stack(want))
    torch.testing.assert_close(batch.old_logprobs[3], logits.log_softmax(-1)[3, 1])
    assert batch.rewards.tolist() == world.scores[[0, 0, 1, 1], members.flatten()].sum(-1).tolist()


@pytest.mark.parametrize("name", ["vocabulary", "max_length", "prompts"])
def test_refuses_a_world_without_a_choice(name):
    with pytest.raises(ConfigError, match=f"`{name}`"):
        World(**{name: 0})
