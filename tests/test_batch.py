import dataclasses
import io
import math

import pytest
import torch

from grpo_lit.batch import TokenBatch, segment_indices
from grpo_lit.objectives import GroupAdvantage
from grpo_lit.rollout import Completion, Group, KeptTokens, Prompt
from grpo_lit.rollouts.minibatch import Rollout, UpdatePlan


def completion(ids, finish="stop", kept=None):
    kept = None if kept is None else KeptTokens.of(kept)
    return Completion(tuple(ids), tuple(-float(i) for i in ids), "", finish, weight_version=3, kept=kept)


@pytest.fixture
def groups():
    # Two prompts; the second sample of the first abstained, and one answer is empty.
    first = Group(
        Prompt("a", "?", token_ids=(7, 8, 9), domain="math"),
        epoch=0,
        completions=(completion([1, 2]), completion([5]), completion([])),
        scores={"answer": [1.0, None, 0.0], "format": [0.5, 0.5, None]},
        rewards=[1.5, None, 0.0],
    )
    second = Group(
        Prompt("b", "?", token_ids=(4,), domain="code"),
        epoch=0,
        completions=(completion([3, 3, 2], "length"),),
        scores={"answer": [0.0], "format": [1.0]},
        rewards=[1.0],
    )
    return [first, second]


# Field bug B8: one of the answers is empty.
def test_groups_become_flat_and_samples_without_a_reward_never_were(groups):
    batch = TokenBatch.from_groups(groups, temperature=0.7, score_names=("answer", "format"))
    assert batch.prompt_ids.tolist() == [7, 8, 9, 4]
    assert batch.prompt_lengths.tolist() == [3, 1]
    assert batch.token_ids.tolist() == [1, 2, 3, 3, 2]
    assert batch.lengths.tolist() == [2, 0, 3]
    assert batch.group.tolist() == [0, 0, 1]
    assert batch.sequence.tolist() == [0, 0, 2, 2, 2]
    assert batch.sampler_logprobs.tolist() == [-1.0, -2.0, -3.0, -3.0, -2.0]
    assert batch.rewards.tolist() == [1.5, 0.0, 1.0]
    assert batch.scores[0].tolist() == [1.0, 0.5]
    assert math.isnan(batch.scores[1, 1])
    assert batch.truncated.tolist() == [False, False, True]
    assert batch.domains == ("code", "math")
    assert batch.domain.tolist() == [1, 1, 0]
    assert batch.weight_version.tolist() == [3, 3, 3]
    assert (batch.temperature, batch.tokens, batch.score_names) == (0.7, 5, ("answer", "format"))


def test_two_equal_prompts_are_two_groups():
    """Field bug D4: groups are told apart by what they are, not by the text of their prompts."""
    same = [
        Group(Prompt(name, "?", token_ids=(7,)), 0, (completion([1]),) * 2, rewards=[0.0, r])
        for name, r in (("a", 1.0), ("b", 0.0))
    ]
    batch = TokenBatch.from_groups(same, 1.0)
    assert batch.group.tolist() == [0, 0, 1, 1]
    advantages = GroupAdvantage(scale="none")(batch, lambda values: values)
    assert advantages.tolist() == [-0.5, 0.5, 0.0, 0.0]


def test_a_reward_that_is_not_a_number_drops_the_sample_too(groups):
    groups[0].rewards = [math.nan, None, 2.0]
    batch = TokenBatch.from_groups(groups, 1.0)
    assert batch.rewards.tolist() == [2.0, 1.0]
    assert batch.lengths.tolist() == [0, 3]


def test_one_known_reward_of_four_is_a_group_of_one(groups):
    groups[0].rewards = [None, None, 1.0]
    batch = TokenBatch.from_groups(groups[:1], 1.0)
    assert batch.rewards.tolist() == [1.0]
    assert batch.prompt_lengths.tolist() == [3]


def test_no_groups_make_an_empty_batch():
    batch = TokenBatch.from_groups([], 1.0, ("answer",))
    assert batch.tokens == 0
    assert batch.scores.shape == (0, 1)
    assert batch.domains == ("default",)
    assert batch.select(torch.zeros(0, dtype=torch.long)).tokens == 0


def full(groups):
    """A batch with every optional field filled with values of its own."""
    batch = TokenBatch.from_groups(groups, 1.0, ("answer", "format"))
    tokens, sequences = torch.arange(5.0), torch.arange(3.0)
    return dataclasses.replace(
        batch,
        advantages=sequences,
        weights=sequences + 10,
        old_logprobs=tokens + 20,
        reference_logprobs=tokens + 30,
        old_entropy=tokens + 40,
        selected=tokens > 2,
        shadow_advantages=torch.stack([sequences, -sequences], 1),
        shadow_weights=torch.stack([sequences, sequences + 1], 1),
        kept_ids=torch.tensor([1, 9, 3, 3, 8, 9, 2], dtype=torch.int32),
        kept_counts=torch.tensor([2, 0, 1, 3, 1]),
        versions=torch.arange(5) + 50,
    )


def test_select_takes_every_field_of_a_sequence_along(groups):
    batch = full(groups)
    picked = batch.select(torch.tensor([2, 0]))
    assert picked.token_ids.tolist() == [3, 3, 2, 1, 2]
    assert picked.lengths.tolist() == [3, 2]
    assert picked.group.tolist() == [1, 0]
    assert picked.prompt_lengths.tolist() == [3, 1]
    assert picked.truncated.tolist() == [True, False]
    assert picked.advantages.tolist() == [2.0, 0.0]
    assert picked.weights.tolist() == [12.0, 10.0]
    assert picked.shadow_advantages.tolist() == [[2.0, -2.0], [0.0, 0.0]]
    assert picked.shadow_weights.tolist() == [[2.0, 3.0], [0.0, 1.0]]
    assert picked.domain.tolist() == [0, 1]
    for name, base in (("old_logprobs", 20), ("reference_logprobs", 30), ("old_entropy", 40)):
        assert (getattr(picked, name) - base).tolist() == [2.0, 3.0, 4.0, 0.0, 1.0], name
    assert picked.selected.tolist() == [False, True, True, False, False]
    assert picked.kept_counts.tolist() == [1, 3, 1, 2, 0]
    assert picked.token_versions.tolist() == [52, 53, 54, 50, 51]
    assert picked.kept_ids.tolist() == [3, 3, 8, 9, 2, 1, 9]


def test_select_drops_prompts_nobody_answers(groups):
    picked = full(groups).select(torch.tensor([2]))
    assert picked.prompt_ids.tolist() == [4]
    assert picked.prompt_lengths.tolist() == [1]
    assert picked.group.tolist() == [0]


def test_selecting_pieces_and_all_is_the_same_batch(groups):
    batch = full(groups)
    same = batch.select(torch.arange(3))
    for field in dataclasses.fields(batch):
        value, again = getattr(batch, field.name), getattr(same, field.name)
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(again, value, equal_nan=True)
        else:
            assert again == value


def test_every_tensor_field_is_selected_or_known(groups):
    # A field that `select` forgot would keep the length of the whole batch.
    picked = full(groups).select(torch.tensor([0]))
    expected = {"T": 2, "S": 1, "N": 1, "P": 3}
    for field in dataclasses.fields(picked):
        value = getattr(picked, field.name)
        if isinstance(value, torch.Tensor):
            assert len(value) in expected.values(), field.name
            assert len(value) != len(getattr(full(groups), field.name)), field.name


def test_to_moves_tensors_and_keeps_the_rest(groups):
    moved = full(groups).to("meta")
    assert moved.rewards.device.type == "meta"
    assert moved.selected.device.type == "meta"
    assert moved.domains == ("code", "math")


def test_kept_tokens_become_flat_and_0_stands_for_the_whole_vocabulary(groups):
    groups[0].completions = (completion([1, 2], kept=[(1, 4), (0, 2, 5)]), completion([5], kept=[(5,)]), completion([]))
    batch = TokenBatch.from_groups(groups, 1.0)  # the second sample was dropped, the last was drawn without limits
    assert batch.kept_counts.tolist() == [2, 3, 0, 0, 0]
    assert batch.kept_ids.tolist() == [1, 4, 0, 2, 5]
    assert batch.kept_ids.dtype == torch.int32
    assert batch.kept.counts is batch.kept_counts


def test_without_limits_no_kept_tokens_are_held(groups):
    assert TokenBatch.from_groups(groups, 1.0).kept is None


def test_every_token_knows_its_weights_where_some_went_on_across_an_update(groups):
    batch = TokenBatch.from_groups(groups, 1.0)
    assert batch.versions is None  # nobody did
    assert batch.token_versions.tolist() == [3] * 5
    groups[1].completions = (completion([3, 3, 2]).sampled_by([3, 5, 8]),)
    batch = TokenBatch.from_groups(groups, 1.0)
    assert batch.token_versions.tolist() == [3, 3, 3, 5, 8]
    assert batch.weight_version.tolist() == [3, 3, 3]  # no token of a sequence is older


def test_a_sampled_token_that_was_not_possible_is_refused(groups):
    groups[1].completions = (completion([3, 6, 2], kept=[(3, 6), (3, 7), (2,)]),)
    with pytest.raises(ValueError, match="but token 6 is not"):
        TokenBatch.from_groups(groups, 1.0)


def test_a_rollout_in_progress_survives_a_checkpoint_with_its_kept_tokens_or_from_before_there_were_any(groups):
    batch, file = full(groups), io.BytesIO()
    torch.save(Rollout(groups, batch, UpdatePlan()).state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again = Rollout.from_state_dict(state).batch
    assert torch.equal(again.kept_ids, batch.kept_ids)
    assert torch.equal(again.kept_counts, batch.kept_counts)
    assert torch.equal(again.versions, batch.versions)
    for name in ("kept_ids", "kept_counts", "versions"):
        del state["batch"][name]
    before = Rollout.from_state_dict(state).batch
    assert before.kept is None
    assert before.token_versions.tolist() == [3] * 5


@pytest.mark.parametrize(
    ("lengths", "segments", "expected"),
    [
        ([2, 3, 1], [2, 0], [5, 0, 1]),
        ([2, 0, 1], [1], []),
        ([2, 0, 1], [1, 2, 1, 0], [2, 0, 1]),
        ([], [], []),
        ([3], [0, 0], [0, 1, 2, 0, 1, 2]),
    ],
)
def test_segment_indices(lengths, segments, expected):
    picked = segment_indices(torch.tensor(lengths, dtype=torch.long), torch.tensor(segments, dtype=torch.long))
    assert picked.tolist() == expected
