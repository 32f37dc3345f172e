"""A rollout in progress on one number of ranks is the same rollout on another."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from grpo_lit.batch import TokenBatch
from grpo_lit.rollout import Completion, Group, KeptTokens, Prompt
from grpo_lit.rollouts.dealing import dealt, joined
from grpo_lit.rollouts.minibatch import Rollout, UpdatePlan

#: Of 5 prompts: their answers' lengths and domains. The fourth has no answer left, as after a filter.
LENGTHS = [(2, 1), (3,), (1, 0, 2), (), (4, 1)]
DOMAINS = ["math", "code", "math", "code", "logic"]


def group(n: int, kept: bool) -> Group:
    tokens = [tuple(range(10 * n + i, 10 * n + i + length)) for i, length in enumerate(LENGTHS[n])]
    possible = [KeptTokens.of([[t, t + 1] for t in part]) if kept else None for part in tokens]
    answers = tuple(
        Completion(part, (-0.1 * n,) * len(part), "x", "stop", weight_version=n, kept=some)
        for part, some in zip(tokens, possible, strict=True)
    )
    prompt = Prompt(str(n), "q", token_ids=(n,) * (n + 1), domain=DOMAINS[n])
    return Group(prompt, 0, answers, rewards=[float(n)] * len(answers), scores={"r": [float(n)] * len(answers)})


def held(places: list[int], plan: UpdatePlan, kept: bool) -> Rollout:
    """What a rank holds: these prompts of the rollout, on which a step has been made already."""
    batch = TokenBatch.from_groups([group(n, kept and n % 2 == 0) for n in places], 1.0, ["r"])
    prompt = torch.tensor(places, dtype=torch.long)[batch.group]
    batch = replace(batch, prompt=prompt, advantages=batch.rewards * 2, stale=batch.weight_version < 2)
    batch = replace(batch, old_logprobs=batch.sampler_logprobs - 1)
    return Rollout((), batch, plan, [])


def spread(shares: list[list[int]], kept: bool = True) -> list[Rollout]:
    """The rollout on so many ranks, with the steps that all of them together have."""
    plan = UpdatePlan(num_updates=2, num_epochs=2, seed=3, prompts=len(LENGTHS))
    parts = [held(places, plan, kept) for places in shares]
    total = sum(torch.bincount(part.batch.prompt, minlength=len(LENGTHS)) for part in parts)
    for part in parts:
        part.updates = plan.sequences(part.batch, lambda mine: (total > 0).to(mine.dtype))
    return parts


def rows(batch: TokenBatch) -> list[tuple]:
    """Every sequence by what it holds, wherever it lies."""
    told = []
    for i in range(len(batch.lengths)):
        one = batch.select(torch.tensor([i]))
        values = {field.name: getattr(one, field.name) for field in fields(one)}
        values |= {"domain": batch.domains[int(one.domain)], "domains": None, "sample": None}
        if one.kept_counts is None or not bool(one.kept_counts.any()):
            values |= {"kept_ids": None, "kept_counts": None}
        told.append(tuple(str(v.tolist() if isinstance(v, Tensor) else v) for v in values.values()))
    return told


def steps(parts: list[Rollout]) -> list[list[tuple]]:
    """The sequences of each optimizer step over all ranks."""
    return [
        sorted(row for part in parts for row in rows(part.batch.select(part.updates[i])))
        for i in range(parts[0].plan.steps)
    ]


@pytest.mark.parametrize("before", [[[0, 1, 2, 3, 4]], [[0, 2, 4], [1, 3]], [[4, 0], [3], [2, 1]]])
@pytest.mark.parametrize("world_size", [1, 2, 6])
def test_every_step_keeps_its_sequences_on_any_number_of_ranks(before: list[list[int]], world_size: int) -> None:
    parts = spread(before)
    after = [dealt(parts, rank, world_size) for rank in range(world_size)]
    assert steps(after) == steps(parts) == steps(spread([[0, 1, 2, 3, 4]]))
    assert sum(map(len, steps(after))) == 2 * 8  # each of 8 sequences in one step of each of 2 epochs
    assert all(part.plan == parts[0].plan for part in after)
    if world_size == 2:  # prompts 0, 1, 2 and 4 have sequences: every second one
        assert [part.batch.prompt.unique().tolist() for part in after] == [[0, 2], [1, 4]]
    if world_size == 6:  # and the last two have none
        assert [len(part.batch.lengths) for part in after] == [2, 1, 3, 2, 0, 0]


def test_on_one_rank_it_is_what_one_rank_would_have_made() -> None:
    """To the order of prompts, so that the next step is the same to the last bit."""
    one, after = spread([[0, 1, 2, 4]])[0], dealt(spread([[4, 0], [2, 1]]), 0, 1)
    for field in fields(TokenBatch):
        expected, got = getattr(one.batch, field.name), getattr(after.batch, field.name)
        if field.name != "sample":
            assert torch.equal(got, expected) if isinstance(expected, Tensor) else got == expected, field.name
    assert [update.tolist() for update in after.updates] == [update.tolist() for update in one.updates]


def test_what_was_possible_everywhere_is_said_where_it_is_not_on_another_rank() -> None:
    without, with_some = held([1], UpdatePlan(), kept=False).batch, held([0], UpdatePlan(), kept=True).batch
    assert without.kept_counts is None
    both = joined([without, with_some])
    assert both.kept_counts.tolist() == [0, 0, 0, 2, 2, 2]
    assert both.kept_ids.tolist() == with_some.kept_ids.tolist()
    assert joined([without, without]).kept_counts is None


def test_versions_of_tokens_are_kept_where_another_rank_has_none() -> None:
    plain = TokenBatch.from_groups([group(0, kept=False)], temperature=1.0)
    crossed = replace(plain, versions=plain.token_versions + 1)
    expected = [*plain.token_versions.tolist(), *crossed.token_versions.tolist()]
    assert joined([plain, crossed]).token_versions.tolist() == expected
    half = len(expected) // 2
    assert joined([crossed, plain]).token_versions.tolist() == expected[half:] + expected[:half]
    assert joined([plain, plain]).versions is None


def test_a_rollout_of_one_rank_from_before_prompts_were_numbered() -> None:
    (part,) = spread([[0, 1, 2, 4]], kept=False)
    part.batch = replace(part.batch, prompt=None)
    assert [d.batch.prompt.unique().tolist() for d in (dealt([part], rank, 2) for rank in (0, 1))] == [[0, 2], [1, 3]]
