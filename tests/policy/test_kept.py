"""The learner over kept tokens: the same whatever the cut, the same on every rank, and a dense softmax says so too."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from grpo_lit.batch import TokenBatch
from grpo_lit.objectives import K3, Objective, TokenMean, TruncatedIS
from grpo_lit.policy.learner import GradientOutput, Learner
from grpo_lit.policy.policy import Policy
from grpo_lit.ranks import Ranks
from grpo_lit.rollout import Completion, Group, KeptTokens, Prompt
from grpo_lit.rollouts.minibatch import UpdatePlan

STRATEGY = SingleDeviceStrategy(device=torch.device("cpu"))
PLAIN = Objective(reduction=TokenMean(), corrections=[TruncatedIS(cap=1.5)])
WITH_KL = Objective(reduction=TokenMean(), corrections=[TruncatedIS(cap=1.5)], divergence=K3(beta=0.1))


def make_rollout(most: int = 12) -> TokenBatch:
    """Four groups; every third completion was drawn without limits, the others among 1 to ``most`` tokens."""
    generator = torch.Generator().manual_seed(0)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(number(4, 260) for _ in range(count))

    def completion(index: int, length: int) -> Completion:
        drawn = tokens(length)
        steps = [tuple({token, *tokens(number(0, most))}) for token in drawn]
        kept = None if index % 3 == 2 and most > 1 else KeptTokens.of(steps)
        return Completion(drawn, (-2.0,) * length, "", "stop", 0, kept)

    groups = []
    for n, (prompt, lengths) in enumerate([(9, [5, 1, 12, 0]), (3, [4, 4, 4]), (20, [2, 17]), (6, [8, 3, 1, 2])]):
        samples = tuple(completion(i, length) for i, length in enumerate(lengths))
        rewards = [float(i % 2) for i in range(len(lengths))]
        groups.append(Group(Prompt(str(n), "", token_ids=tokens(prompt)), 0, samples, rewards=rewards))
    return TokenBatch.from_groups(groups, temperature=0.9)


def gradient_of(
    policy: Policy, batch: TokenBatch, budget: int = 9999, share: bool = True, **changes: object
) -> tuple[GradientOutput, list[Tensor]]:
    settings: dict = {"ranks": Ranks(STRATEGY), "reference": None, "old_policy": None} | changes
    objective = PLAIN if settings["reference"] is None else WITH_KL
    learner = Learner(objective, budget, share, settings["ranks"], torch.device("cpu"))
    batch, _ = learner.prepare(batch, UpdatePlan(), policy, settings["reference"])
    policy.zero_grad()
    models = {name: settings[name] for name in ("reference", "old_policy")}
    output = learner.gradient(policy, batch, lambda loss: loss.backward(), lambda more: nullcontext(), **models)
    return output, [p.grad.clone() for p in policy.parameters()]


def distance(got: list[Tensor], expected: list[Tensor]) -> float:
    a, b = (torch.cat([g.flatten().double() for g in gradient]) for gradient in (got, expected))
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def doubles(policy: Policy, reference: Policy) -> tuple[Policy, Policy]:
    """Both in float64: among few tokens they differ by many nats, and their k3 multiplies the rounding of float32."""
    return copy.deepcopy(policy).double(), copy.deepcopy(reference).double()


@pytest.mark.parametrize(("budget", "share"), [(1, True), (40, True), (1, False), (60, False)])
def test_cut_and_layout_change_neither_loss_nor_gradient(
    doubles: tuple[Policy, Policy], budget: int, share: bool
) -> None:
    policy, reference = doubles
    batch = make_rollout()
    whole, expected = gradient_of(policy, batch, reference=reference)
    parts, got = gradient_of(policy, batch, budget, share, reference=reference)
    assert whole.micro_batches == 1
    assert parts.micro_batches > 1
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6, abs=1e-6)
    assert distance(got, expected) <= 2e-6
    ours, theirs = parts.rates.compute(), whole.rates.compute()
    for metric, value in theirs.items():
        assert ours[metric] == pytest.approx(value, rel=1e-5, abs=1e-7, nan_ok=True), metric
    free = replace(batch, kept_ids=None, kept_counts=None)
    assert distance(got, gradient_of(policy, free, reference=reference)[1]) > 0.1


def test_order_of_sequences_changes_neither_loss_nor_gradient(doubles: tuple[Policy, Policy]) -> None:
    policy, reference = doubles
    batch = make_rollout()
    order = torch.randperm(len(batch.lengths), generator=torch.Generator().manual_seed(1))
    whole, expected = gradient_of(policy, batch, 50, reference=reference)
    shuffled, got = gradient_of(policy, batch.select(order), 50, reference=reference)
    assert shuffled.loss == pytest.approx(whole.loss, rel=1e-6, abs=1e-6)
    assert distance(got, expected) <= 2e-6


@pytest.mark.parametrize("budget", [30, 9999])
def test_log_probs_and_entropy_are_those_of_a_dense_softmax_over_the_kept_tokens(policy: Policy, budget: int) -> None:
    batch = make_rollout()
    learner = Learner(PLAIN, budget, True, Ranks(STRATEGY), torch.device("cpu"))
    seen = learner.evaluate(policy, batch)
    prompts = batch.prompt_ids.split(batch.prompt_lengths.tolist())
    steps, at = batch.kept_ids.split(batch.kept_counts.tolist()), 0
    for group, completion in zip(batch.group.tolist(), batch.token_ids.split(batch.lengths.tolist()), strict=True):
        ids = torch.cat([prompts[group], completion])
        with torch.no_grad():
            logits = policy.model(ids[None]).logits[0, len(prompts[group]) - 1 : -1].double() / batch.temperature
        for token, row in zip(completion.tolist(), logits, strict=True):
            kept = steps[at].long() if len(steps[at]) else torch.arange(len(row))
            log_p = row[kept].log_softmax(0)
            assert float(seen.logprobs[at]) == pytest.approx(float(log_p[kept == token]), abs=1e-5)
            assert float(seen.entropy[at]) == pytest.approx(float(-(log_p.exp() * log_p).sum()), abs=1e-5)
            at += 1
    assert at == batch.tokens


def test_reference_and_old_policy_speak_of_the_same_tokens(policy: Policy) -> None:
    # Both are the policy itself: over anything but the same tokens their KL and log-ratio would not be exactly 0.
    twin = copy.deepcopy(policy).requires_grad_(False)
    output, _ = gradient_of(policy, make_rollout(), 40, reference=twin, old_policy=twin)
    values = output.rates.compute()
    assert values["optimization/kl_reference"] == values["optimization/kl_old"] == 0.0
    assert values["optimization/ratio_max"] == 1.0


def test_old_log_probs_of_later_updates_are_over_the_kept_tokens(policy: Policy) -> None:
    batch = make_rollout()
    learner = Learner(PLAIN, 9999, True, Ranks(STRATEGY), torch.device("cpu"))
    prepared, _ = learner.prepare(batch, UpdatePlan(num_epochs=2), policy, None)
    exact = learner.evaluate(policy, batch).logprobs
    moving = (prepared.advantages != 0)[prepared.sequence]
    torch.testing.assert_close(prepared.old_logprobs[moving], exact[moving], rtol=1e-5, atol=1e-5)


def test_where_one_token_was_possible_nothing_moves(policy: Policy) -> None:
    batch = make_rollout(most=1)
    assert set(batch.kept_counts.tolist()) == {1}
    output, gradient = gradient_of(policy, batch)
    assert output.micro_batches == 1
    assert all(float(g.abs().max()) == 0.0 for g in gradient)
    assert output.rates.compute()["exploration/entropy"] == 0.0


class BusyElsewhere(Ranks):
    """Another rank needs two micro-batches more than this one."""

    def max(self, values: Tensor) -> Tensor:
        return values + 2


def test_a_rank_keeps_step_with_others_whether_or_not_it_has_kept_tokens(policy: Policy, reference: Policy) -> None:
    batch = make_rollout()
    free = replace(batch, kept_ids=None, kept_counts=None)
    names = []
    for mine in (batch, free):
        output, gradient = gradient_of(policy, mine, reference=reference)
        idle, with_idle = gradient_of(policy, mine, reference=reference, ranks=BusyElsewhere(STRATEGY))
        assert idle.micro_batches == output.micro_batches + 2
        assert all(torch.equal(a, b) for a, b in zip(gradient, with_idle, strict=True))
        names.append(set(output.rates.compute()))
    assert names[0] == names[1]  # they travel as one vector


def test_how_many_tokens_were_possible_is_logged(policy: Policy) -> None:
    batch = make_rollout()
    output, _ = gradient_of(policy, batch, 40)
    limited = batch.kept_counts[batch.kept_counts > 0]
    assert output.rates.compute()["system/kept_tokens"] == pytest.approx(float(limited.double().mean()))
