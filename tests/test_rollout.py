"""Kept tokens are packed without loss, and sampling settings that leave nothing possible are refused."""

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
    with_kept = Completion((7, 7, 1), (-0.5, 0.0, -0.1), "x", "stop", 4, KeptTokens.of(STEPS))
    without = Completion((5,), (-1.0,), "y", "length", 4)
    group = Group(Prompt("a", "?", token_ids=(1, 2)), 0, (with_kept, without), rewards=[1.0, 0.0])
    file = io.BytesIO()
    torch.save(group.state_dict(), file)
    file.seek(0)
    again = Group.from_state_dict(torch.load(file, weights_only=True))
    assert again == group
    assert again.completions[0].kept.steps() == STEPS


def test_a_group_saved_before_there_were_kept_tokens_still_loads() -> None:
    group = Group(Prompt("a", "?"), 0, (Completion((5,), (-1.0,), "y", "length", 4),), rewards=[1.0])
    state = group.state_dict()
    for completion in state["completions"]:
        del completion["kept"]
    assert Group.from_state_dict(state) == group


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
