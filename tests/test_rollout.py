"""Every token knows what was possible and which weights drew it; settings that leave nothing possible are refused."""

import io

import pytest
import torch

from grpo_lit.errors import ConfigError
from grpo_lit.rollout import Completion, Group, KeptTokens, Prompt, Sampling

STEPS = [(3, 7, 151_935), (7,), (0, 1)]


def test_kept_tokens_come_back_as_they_were_packed() -> None:
    kept = KeptTokens.of(STEPS)
    assert kept.counts == (3, 1, 2)
    assert len(kept.ids) == 4 * 6  # bytes
    assert kept.steps() == STEPS
    assert KeptTokens.of([]).steps() == []


def test_kept_tokens_belong_to_the_tokens() -> None:
    with pytest.raises(ValueError, match="`ids` expected 4 bytes for each of 2 tokens, but got 4"):
        KeptTokens((2,), KeptTokens.of([(1,)]).ids)
    with pytest.raises(ValueError, match=r"`kept` expected one set per token \(2\), but got 3"):
        Completion((3, 7), (0.0, 0.0), "", "stop", 0, KeptTokens.of(STEPS))


def test_a_group_with_kept_tokens_survives_a_checkpoint() -> None:
    with_kept = Completion((7, 7, 1), (-0.5, 0.0, -0.1), "x", "stop", 4, KeptTokens.of(STEPS), (4, 4, 6))
    without = Completion((5,), (-1.0,), "y", "length", 4)
    group = Group(Prompt("a", "?", token_ids=(1, 2)), 0, (with_kept, without), rewards=[1.0, 0.0])
    file = io.BytesIO()
    torch.save(group.state_dict(), file)
    file.seek(0)
    again = Group.from_state_dict(torch.load(file, weights_only=True))
    assert again == group
    assert again.completions[0].kept.steps() == STEPS
    assert [one.token_versions for one in again.completions] == [(4, 4, 6), (4,)]


def test_a_group_saved_before_there_were_kept_tokens_and_versions_still_loads() -> None:
    group = Group(Prompt("a", "?"), 0, (Completion((5,), (-1.0,), "y", "length", 4),), rewards=[1.0])
    state = group.state_dict()
    for completion in state["completions"]:
        del completion["kept"], completion["versions"]
    assert Group.from_state_dict(state) == group


def test_versions_are_one_for_each_token_and_rise() -> None:
    whole = Completion((3, 7, 9), (0.0,) * 3, "", "stop", 4)
    assert whole.token_versions == (4, 4, 4)
    crossed = whole.sampled_by([2, 2, 5])
    assert (crossed.weight_version, crossed.token_versions) == (2, (2, 2, 5))
    assert whole.sampled_by([6, 6, 6]) == Completion((3, 7, 9), (0.0,) * 3, "", "stop", 6)
    empty = Completion((), (), "", "length", 4)
    assert empty.sampled_by([]) == empty
    assert Group(Prompt("a", "?"), 0, (whole, crossed, empty)).oldest_version == 2
    with pytest.raises(ValueError, match=r"`versions` expected one per token \(3\), but got 2"):
        whole.sampled_by([2, 5])
    with pytest.raises(ValueError, match=r"`versions` expected to rise from 5, but got \(5, 6, 2\)"):
        whole.sampled_by([5, 6, 2])
    with pytest.raises(ValueError, match="to rise from 4"):
        Completion((3,), (0.0,), "", "stop", 4, versions=(3,))


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("top_p", float("nan")), ("min_p", -0.1), ("min_p", 1.1)],
)
def test_limits_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"`data.sampling.{name}` expected .* but got {value}"):
        Sampling(**{name: value})


def test_only_limits_that_bite_truncate() -> None:
    assert not Sampling().truncates
    assert not Sampling(top_k=0, top_p=1.0, min_p=0.0).truncates
    assert Sampling(top_k=1).truncates
    assert Sampling(top_p=0.9).truncates
    assert Sampling(min_p=0.1).truncates
    assert not Sampling(temperature=0.0, top_k=5).truncates  # greedy: evaluation only
