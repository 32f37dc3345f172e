"""The learner's loss and gradient do not depend on how the step was cut, ordered or laid out."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from grpo_lit.batch import TokenBatch
from grpo_lit.objectives import (
    K3,
    ConstantLength,
    Objective,
    SequenceMean,
    Shadows,
    TokenMean,
    TruncatedIS,
    ZeroSignalFilter,
)
from grpo_lit.policy import learner as learner_module
from grpo_lit.policy.learner import GradientOutput, Learner
from grpo_lit.policy.packing import pack_rows
from grpo_lit.policy.policy import Policy
from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Completion, Group, Prompt
from grpo_lit.rollouts.minibatch import UpdatePlan

ONE_PROCESS = Ranks(SingleDeviceStrategy(device=torch.device("cpu")))


def make_rollout() -> TokenBatch:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, 260, (count,), generator=generator).tolist())

    groups = []
    for n, (prompt, lengths) in enumerate([(9, [5, 1, 12, 0]), (3, [4, 4, 4]), (20, [2, 17]), (6, [8, 3, 1, 2])]):
        samples = tuple(Completion(tokens(k), (-5.0,) * k, "", "stop", 0) for k in lengths)
        rewards = [1.0] * len(lengths) if n == 1 else [float(i % 2) for i in range(len(lengths))]  # group 1: no signal
        groups.append(Group(Prompt(str(n), "", token_ids=tokens(prompt)), 0, samples, rewards=rewards))
    return TokenBatch.from_groups(groups, temperature=0.9)


def gradient_of(
    policy: Policy,
    objective: Objective,
    batch: TokenBatch,
    budget: int,
    share: bool,
    reference: Policy | None = None,
    shadows: Shadows | None = None,
) -> tuple[GradientOutput, list[Tensor]]:
    learner = Learner(objective, budget, share, ONE_PROCESS, torch.device("cpu"), shadows)
    batch, _ = learner.prepare(batch, UpdatePlan(), policy, reference)
    policy.zero_grad()
    output = learner.gradient(policy, batch, lambda loss: loss.backward(), lambda more: nullcontext(), reference)
    return output, [p.grad.clone() for p in policy.parameters()]


def distance(got: list[Tensor], expected: list[Tensor]) -> float:
    """Relative distance of two gradients: |a - b| / |b| over all parameters."""
    a, b = (torch.cat([g.flatten().double() for g in gradient]) for gradient in (got, expected))
    return float((a - b).norm() / b.norm())


OBJECTIVES = {
    "sequence_mean": Objective(reduction=SequenceMean()),
    "token_mean": Objective(reduction=TokenMean(), corrections=[TruncatedIS(cap=1.5)]),
    "constant_kl": Objective(reduction=ConstantLength(20), divergence=K3(beta=0.1)),
}


# Field bug D4: micro-batches smaller than a group, down to one sequence.
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize(
    ("budget", "share"), [(1, True), (40, True), (60, True), (1, False), (60, False), (9999, False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cut_and_layout_change_neither_loss_nor_gradient(
    policy: Policy, reference: Policy, name: str, budget: int, share: bool, dtype: torch.dtype
) -> None:
    objective, batch = OBJECTIVES[name], make_rollout()
    policy, reference = (copy.deepcopy(model).to(dtype) for model in (policy, reference))
    whole, expected = gradient_of(policy, objective, batch, 9999, True, reference)
    parts, got = gradient_of(policy, objective, batch, budget, share, reference)
    assert whole.micro_batches == 1
    assert parts.micro_batches > 1 or budget == 9999
    # The loss is a sum of terms of both signs and order 1: rounding is relative to those, not to what is left.
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6, abs=1e-6 if dtype == torch.float32 else 1e-7)
    # float32 sums in another order differ by some of its 6e-8, how many depends on the CPU's vector instructions. A
    # float64 model still rotates and normalises in float32, as transformers writes these layers.
    single = dtype == torch.float32
    assert distance(got, expected) <= (8e-6 if single else 3e-7)
    ours, theirs = parts.rates.compute(), whole.rates.compute()
    for metric, value in theirs.items():
        assert ours[metric] == pytest.approx(value, rel=1e-5, abs=1e-6 if single else 1e-7, nan_ok=True)


def test_order_of_sequences_changes_neither_loss_nor_gradient(policy: Policy) -> None:
    batch, objective = make_rollout(), OBJECTIVES["token_mean"]
    order = torch.randperm(len(batch.lengths), generator=torch.Generator().manual_seed(1))
    whole, expected = gradient_of(policy, objective, batch, 50, True)
    shuffled, got = gradient_of(policy, objective, batch.select(order), 50, True)
    assert shuffled.loss == pytest.approx(whole.loss, rel=1e-6, abs=1e-6)
    assert distance(got, expected) <= 8e-6


def test_sequences_without_signal_cost_no_forward_but_stay_in_the_counts(policy: Policy) -> None:
    batch = make_rollout()
    objective = OBJECTIVES["sequence_mean"]
    learner = Learner(objective, 9999, True, ONE_PROCESS, torch.device("cpu"))
    assert learner.counts(batch).sequences == 13
    output, _ = gradient_of(policy, objective, batch, 9999, True)
    # Group 1 has 12 of the 63 tokens, and no signal.
    assert batch.tokens == 63
    assert output.tokens == 63 - 12


@pytest.mark.parametrize("least", [1, 12])
def test_ranks_agree_on_the_number_of_micro_batches_before_the_first_forward(policy: Policy, least: int) -> None:
    # A forward gathers shards from all ranks (FSDP2): one that still asks how many there are would wait for ever.
    events: list[str] = []

    def most(values: Tensor) -> Tensor:
        events.append("asked")
        return values.clamp(min=least)

    ranks = Mock(spec=Ranks, rank=0, world_size=2, sum=lambda values: values, max=most)
    hook = policy.register_forward_pre_hook(lambda *_: events.append("forward"))
    Learner(Objective(), 60, True, ranks, torch.device("cpu")).evaluate(policy, make_rollout())
    hook.remove()
    assert events[0] == "asked"
    assert events[1:] == ["forward"] * len(events[1:])
    assert len(events[1:]) == 12 if least == 12 else 1 < len(events[1:]) < 12  # other ranks have more


def test_packs_are_made_in_their_turn(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    # All of them at once would take memory by the number of groups.
    made: list[int] = []
    monkeypatch.setattr(learner_module, "pack_rows", lambda *a, **k: made.append(1) or pack_rows(*a, **k))
    learner = Learner(Objective(), 30, True, ONE_PROCESS, torch.device("cpu"))
    batch, _ = learner.prepare(make_rollout(), UpdatePlan(), policy, None)
    at_backward: list[int] = []

    def backward(loss: Tensor) -> None:
        at_backward.append(len(made))
        loss.backward()

    output = learner.gradient(policy, batch, backward, lambda more: nullcontext())
    assert output.micro_batches > 3
    assert at_backward == list(range(1, output.micro_batches + 1))


def test_a_batch_without_any_signal_runs_no_micro_batch(policy: Policy) -> None:
    batch = make_rollout()
    batch = replace(batch, rewards=torch.ones_like(batch.rewards))
    learner = Learner(OBJECTIVES["token_mean"], 9999, True, ONE_PROCESS, torch.device("cpu"))
    prepared, _ = learner.prepare(batch, UpdatePlan(), policy, None)
    output = learner.gradient(policy, prepared, lambda loss: loss.backward(), lambda more: nullcontext())
    assert (output.micro_batches, output.tokens, output.loss) == (0, 0, 0.0)
    assert set(output.rates.compute()) >= {"optimization/clip_low", "exploration/entropy", "system/is_cut"}


def test_answers_that_are_all_empty_move_nothing_and_no_number_is_nan(policy: Policy) -> None:
    """Field bug B8."""
    empty = Completion((), (), "", "length", 0)
    group = Group(Prompt("q", "", token_ids=(5, 6)), 0, (empty, empty), rewards=[1.0, 0.0])
    batch = TokenBatch.from_groups([group], 1.0)
    for name in ("sequence_mean", "token_mean"):
        learner = Learner(OBJECTIVES[name], 9999, True, ONE_PROCESS, torch.device("cpu"))
        prepared, _ = learner.prepare(batch, UpdatePlan(num_updates=1, num_epochs=2), policy, None)
        assert prepared.advantages.isfinite().all()
        assert prepared.weights is None or prepared.weights.isfinite().all()
        output = learner.gradient(policy, prepared, lambda loss: loss.backward(), lambda more: nullcontext())
        assert (output.micro_batches, output.tokens, output.loss) == (0, 0, 0.0)


def test_old_log_probs_are_scored_for_later_updates_only(policy: Policy) -> None:
    batch = make_rollout()
    learner = Learner(OBJECTIVES["token_mean"], 9999, True, ONE_PROCESS, torch.device("cpu"))
    once, updates = learner.prepare(batch, UpdatePlan(), policy, None)
    assert once.old_logprobs is None
    assert [u.tolist() for u in updates] == [list(range(13))]
    twice, updates = learner.prepare(batch, UpdatePlan(num_epochs=2), policy, None)
    assert len(updates) == 2
    exact = learner.evaluate(policy, batch).logprobs
    moving = (twice.advantages != 0)[twice.sequence]
    torch.testing.assert_close(twice.old_logprobs[moving], exact[moving], rtol=1e-5, atol=1e-5)
    # No forward for the others, and yet no 0 either: an entropy bonus that switches on would compare with it.
    assert torch.equal(twice.old_logprobs[~moving], batch.sampler_logprobs[~moving])


def test_stale_sequences_have_their_sampler_for_an_old_policy_and_cost_no_forward(policy: Policy) -> None:
    batch = make_rollout()
    stale = batch.group == 0
    learner, plan = Learner(Objective(), 500, True, ONE_PROCESS, torch.device("cpu")), UpdatePlan(num_epochs=2)
    fresh, _ = learner.prepare(batch, plan, policy, None)
    mixed, _ = learner.prepare(replace(batch, stale=stale), plan, policy, None)
    theirs = stale[batch.sequence]
    assert bool((mixed.old_logprobs[theirs] == -5.0).all())  # what the sampler said
    torch.testing.assert_close(mixed.old_logprobs[~theirs], fresh.old_logprobs[~theirs])
    counted = Mock(wraps=policy, spec=Policy)
    learner.prepare(replace(batch, stale=torch.ones_like(stale)), plan, counted, None)
    assert counted.call_count == 0


# Field bug D4.
def test_minibatches_hold_whole_groups_and_every_group_once_an_epoch() -> None:
    batch = make_rollout()
    updates = UpdatePlan(num_updates=3, num_epochs=2, seed=4).sequences(batch)
    assert len(updates) == 6
    for epoch in (updates[:3], updates[3:]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(13))
        groups = [set(batch.group[part].tolist()) for part in epoch]
        assert sum(len(g) for g in groups) == 4  # no group is in two minibatches


def test_minibatches_do_not_depend_on_how_prompts_are_spread_over_ranks() -> None:
    batch = make_rollout()
    plan = UpdatePlan(num_updates=2, num_epochs=2, seed=4, prompts=5)
    # Two ranks take turns. Nobody holds prompt 4: all of its samples were dropped.
    whole = replace(batch, prompt=batch.group)
    shares = [whole.select((batch.group % 2 == rank).nonzero()[:, 0]) for rank in range(2)]
    present = torch.zeros(5).index_fill(0, batch.group, 1.0)
    alone = [set(batch.group[part].tolist()) for part in plan.sequences(whole)]
    assert [len(part) for part in alone] == [2, 2, 2, 2]
    spread = [plan.sequences(share, lambda _: present) for share in shares]
    together = [
        set(shares[0].prompt[first].tolist()) | set(shares[1].prompt[second].tolist())
        for first, second in zip(*spread, strict=True)
    ]
    assert together == alone


SHADOWS = Shadows({"kl": Objective(divergence=K3(beta=0.3)), "sums": Objective(reduction=TokenMean())})


@pytest.mark.parametrize("budget", [1, 60, 9999])
def test_shadows_are_measured_and_change_nothing(policy: Policy, reference: Policy, budget: int) -> None:
    batch, objective = make_rollout(), OBJECTIVES["sequence_mean"]
    alone, expected = gradient_of(policy, objective, batch, 9999, True)
    output, got = gradient_of(policy, objective, batch, budget, True, reference, SHADOWS)
    assert distance(got, expected) <= 8e-6
    assert output.loss == pytest.approx(alone.loss, rel=1e-6, abs=1e-6)
    seen, logged = alone.rates.compute(), output.rates.compute()
    assert {name: logged[name] for name in seen} == pytest.approx(seen, rel=1e-5, abs=1e-6, nan_ok=True)
    values = SHADOWS.derived(output.rates.compute())
    # Of a whole batch, with every log-prob at hand.
    learner = Learner(objective, 9999, True, ONE_PROCESS, torch.device("cpu"), SHADOWS)
    full, _ = learner.prepare(batch, UpdatePlan(), policy, reference)
    full = replace(full, weights=objective.weights(full, learner.counts(full)))
    full = SHADOWS.with_weights(full, lambda x: x)
    full = replace(full, reference_logprobs=learner.evaluate(reference, full).logprobs)
    seen = learner.evaluate(policy, full)
    whole = SHADOWS.derived(SHADOWS.measure(objective, full, seen.logprobs, seen.entropy).compute())
    for name, value in whole.items():
        assert values[name] == pytest.approx(value, rel=1e-4), name
    assert values["shadow/cosine_kl"] < 0.999  # the reference is another model: its KL has a gradient
    assert 0.5 < values["shadow/cosine_sums"] < 0.999


def test_a_batch_that_moves_shadows_only_is_not_trained_on(policy: Policy, reference: Policy) -> None:
    batch = make_rollout()
    batch = replace(batch, rewards=torch.ones_like(batch.rewards))
    learner = Learner(OBJECTIVES["sequence_mean"], 9999, True, ONE_PROCESS, torch.device("cpu"), SHADOWS)
    batch, _ = learner.prepare(batch, UpdatePlan(), policy, reference)
    output = learner.gradient(policy, batch, lambda loss: loss.backward(), lambda more: nullcontext(), reference)
    assert output.micro_batches == 0
    assert SHADOWS.derived(output.rates.compute())  # the names are there, on every rank the same


def test_groups_without_signal_pay_kl_unless_they_are_filtered(policy: Policy, reference: Policy) -> None:
    # Field bug A6.
    batch = make_rollout()
    batch = replace(batch, rewards=torch.ones_like(batch.rewards))
    _, paid = gradient_of(policy, Objective(divergence=K3(beta=0.1)), batch, 9999, True, reference)
    assert max(float(g.abs().max()) for g in paid) > 1e-4
    filtered = Objective(divergence=K3(beta=0.1), filters=[ZeroSignalFilter()])
    learner = Learner(filtered, 9999, True, ONE_PROCESS, torch.device("cpu"))
    batch, _ = learner.prepare(batch, UpdatePlan(), policy, reference)
    output = learner.gradient(policy, batch, lambda loss: loss.backward(), lambda more: nullcontext(), reference)
    assert output.micro_batches == 0  # no step is made of it
