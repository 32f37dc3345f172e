"""What must hold for every mixture of parts that is not refused."""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lit import objectives as parts
from grpo_lit.batch import SumRanks, TokenBatch
from grpo_lit.errors import ConfigError
from grpo_lit.metrics.rates import Rates
from grpo_lit.objectives import Counts, Objective, SequenceClip

ADVANTAGES = [
    parts.GDPOAdvantage({"a": 2.0}),
    *(parts.GroupAdvantage(scale, loo) for scale in ("group_std", "batch_std", "none") for loo in (False, True)),
]
SURROGATES = [
    parts.TokenClip(),
    parts.TokenClip(0.2, 0.28, dual=3.0),
    parts.CappedRatio(),
    parts.SequenceClip(),
    parts.SequenceClip(0.2, 0.3, "product"),
    parts.SequenceTokenClip(),
    parts.GeometricMean(),
    parts.CISPO(),
    parts.CISPO(0.5, 0.28),
    parts.PolicyGradient(),
    parts.SAPO(),
    parts.DPPO("tv"),
    parts.DPPO("kl", 0.05, 0.05, anchor="old"),
]
BETA = {"math": 0.0, "default": 0.1}
DIVERGENCES = [
    None,
    *(kind(place="reward") for kind in (parts.K1, parts.K3)),
    *(
        kind(beta, weighting, normalise)
        for kind, beta in ((parts.K1, 0.1), (parts.K2, BETA), (parts.K3, 0.1), (parts.K3, 0.0))
        for weighting, normalise in (("none", "none"), ("ratio", "length"))
    ),
]
TIS, MASK = parts.TruncatedIS(), parts.SequenceMaskedIS(ratio="product", kept="one")
CORRECTIONS = [
    (),
    (TIS,),
    (parts.SequenceTruncatedIS(),),
    (parts.SequenceTruncatedIS(ratio="geometric"), parts.MaskedIS(kept="one")),
    (parts.MaskedIS(),),
    (parts.SequenceMaskedIS(), parts.OffPolicySequenceMask()),
    (MASK, TIS, parts.OffPolicySequenceMask(behaviour="old")),
]
OVERLONG, ZERO = parts.OverlongFilter(), parts.ZeroSignalFilter()
PARTS = {
    "advantage": ADVANTAGES,
    "surrogate": SURROGATES,
    "divergence": DIVERGENCES,
    "corrections": CORRECTIONS,
    "reduction": [parts.SequenceMean(), parts.TokenMean(), parts.GroupTokenMean(), parts.ConstantLength(7)],
    "filters": [(), (OVERLONG,), (ZERO,), (OVERLONG, ZERO)],
    "selection": [None, parts.TopEntropy(0.4)],
    "entropy_coefficient": [0.0, 0.01],
}

# beartype picks what to check at random, which Hypothesis takes for part of the strategies.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")

QUICK = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


@st.composite
def objectives(draw: st.DrawFn, **fixed: object) -> Objective:
    choice = {name: draw(st.sampled_from(members)) for name, members in PARTS.items() if name not in fixed}
    try:
        return Objective(**choice, **fixed)
    except ConfigError:
        assume(False)


@dataclass(frozen=True)
class World:
    """A rollout, scored by reference and old policy, and what the policy being trained says of it."""

    batch: TokenBatch
    logprobs: Tensor
    entropy: Tensor


@st.composite
def worlds(draw: st.DrawFn, gaps: Sequence[float] = (0.05, 0.5, 3.0)) -> World:
    """Draw one to three groups of one to four completions of up to four tokens."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count = {"min_size": sum(sizes), "max_size": sum(sizes)}
    lengths = draw(st.lists(st.integers(0, 4), **count))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), **count))
    return random_world(sizes, lengths, rewards, draw(st.sampled_from(gaps)), draw(st.integers(0, 2**20)))


def random_world(
    sizes: Sequence[int], lengths: Sequence[int], rewards: Sequence[float], gap: float, seed: int
) -> World:
    """Make a rollout whose old, sampler and reference log-probs are about ``gap`` from the policy's."""
    generator, sequences, tokens = torch.Generator().manual_seed(seed), len(lengths), sum(lengths)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(tokens, dtype=torch.float64, generator=generator)

    logprobs = -1.0 - noise(1.0).abs()
    batch = TokenBatch(
        prompt_ids=torch.arange(len(sizes)),
        prompt_lengths=torch.ones(len(sizes), dtype=torch.long),
        group=torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
        token_ids=torch.arange(tokens),  # each token's place in the world, for `step`
        lengths=torch.tensor(lengths),
        sampler_logprobs=logprobs + noise(gap),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        scores=torch.randint(0, 3, (sequences, 2), generator=generator).double(),
        domain=torch.randint(0, 2, (sequences,), generator=generator),
        weight_version=torch.zeros(sequences, dtype=torch.long),
        old_logprobs=logprobs + noise(gap),
        reference_logprobs=logprobs + noise(gap),
        old_entropy=noise(1.0).abs(),
        truncated=torch.rand(sequences, generator=generator) < 0.3,
        domains=("code", "math"),
        score_names=("a", "b"),
    )
    return World(batch, logprobs, noise(1.0).abs())


def prepare(objective: Objective, batch: TokenBatch, sum_ranks: SumRanks = lambda x: x) -> TokenBatch:
    """Do what comes before micro-batches."""
    batch = replace(batch, advantages=objective.advantages(batch, sum_ranks))
    batch = objective.filtered(batch)
    batch = replace(batch, selected=objective.selected(batch, sum_ranks))
    return replace(batch, weights=objective.weights(batch, Counts.of(batch, sum_ranks)))


@dataclass(frozen=True)
class Step:
    """Loss, gradient by token of the original rollout, and rates."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    rates: Rates


def step(objective: Objective, world: World, batch: TokenBatch, pieces: Sequence[Tensor]) -> Step:
    """Accumulate the gradient of a prepared batch piece by piece."""
    logprobs = world.logprobs.clone().requires_grad_()
    entropy = world.entropy.clone().requires_grad_()
    rates, loss = Rates(), 0 * (logprobs.sum() + entropy.sum())
    for piece in pieces:
        micro = batch.select(piece)
        output = objective.loss(micro, logprobs[micro.token_ids], entropy[micro.token_ids])
        loss = loss + output.loss
        rates.merge(output.rates)
    return Step(loss.detach(), *torch.autograd.grad(loss, [logprobs, entropy]), rates)


def whole_step(objective: Objective, world: World) -> Step:
    batch = prepare(objective, world.batch)
    return step(objective, world, batch, [torch.arange(len(batch.lengths))])


def assert_same(got: Step, expected: Step) -> None:
    for name in ("loss", "logprobs", "entropy"):
        a, b = getattr(got, name), getattr(expected, name)
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10 * max(1.0, float(b.abs().max()) if b.numel() else 1.0))
    assert got.rates.compute() == pytest.approx(expected.rates.compute(), rel=1e-8, abs=1e-10, nan_ok=True)


@QUICK
@given(objectives(), worlds(), st.data())
def test_micro_batches_change_nothing(objective, world, data):
    batch = prepare(objective, world.batch)
    order = data.draw(st.permutations(range(len(batch.lengths))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=3)))
    pieces = [torch.tensor(order[a:b], dtype=torch.long) for a, b in itertools.pairwise([0, *cuts, len(order)])]
    assert_same(step(objective, world, batch, pieces), whole_step(objective, world))


@QUICK
@given(objectives(), worlds(), st.data())
def test_order_changes_nothing(objective, world, data):
    order = torch.tensor(data.draw(st.permutations(range(len(world.batch.lengths)))))
    batch = prepare(objective, world.batch.select(order))
    shuffled = step(objective, world, batch, [torch.arange(len(batch.lengths))])
    assert_same(shuffled, whole_step(objective, world))


@QUICK
@given(objectives(), worlds(), st.data())
def test_ranks_change_nothing(on_ranks, objective, world, data):
    rank = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=3, max_size=3)))[world.batch.group]
    batches = [world.batch.select((rank == r).nonzero().flatten()) for r in (0, 1)]
    prepared = on_ranks(lambda batch, sum_ranks: prepare(objective, batch, sum_ranks), batches)
    steps = [step(objective, world, batch, [torch.arange(len(batch.lengths))]) for batch in prepared]
    sums = [steps[0].loss + steps[1].loss, steps[0].logprobs + steps[1].logprobs, steps[0].entropy + steps[1].entropy]
    together = Step(*sums, steps[0].rates.merge(steps[1].rates))
    assert_same(together, whole_step(objective, world))


@QUICK
@given(objectives(), worlds())
def test_sharing_prompts_changes_nothing(objective, world):
    batch = prepare(objective, world.batch)
    sequences = len(batch.lengths)
    apart = replace(
        batch,
        prompt_ids=batch.prompt_ids[batch.group],
        prompt_lengths=batch.prompt_lengths[batch.group],
        group=torch.arange(sequences),
    )
    assert_same(step(objective, world, apart, [torch.arange(sequences)]), whole_step(objective, world))


@QUICK
@given(objectives(), worlds())
def test_leaving_out_what_does_not_contribute_changes_no_gradient(objective, world):
    batch = prepare(objective, world.batch)
    kept = objective.contributes(batch).nonzero().flatten()
    short, full = step(objective, world, batch, [kept]), whole_step(objective, world)
    torch.testing.assert_close(short.logprobs, full.logprobs)
    torch.testing.assert_close(short.entropy, full.entropy)


@QUICK
@given(objectives(), worlds(gaps=(0.0,)), st.data(), st.sampled_from([torch.float32, torch.float64]))
def test_far_log_ratios_have_finite_gradients(objective, world, data, dtype):
    # Every pair of the four policies is up to 100 nats apart, and no token is left as it was.
    tokens = world.batch.tokens

    def far() -> Tensor:
        signs = data.draw(st.lists(st.sampled_from([-101.0, -51.0, -1.0]), min_size=tokens, max_size=tokens))
        return torch.tensor(signs, dtype=dtype)

    fields = {"sampler_logprobs": far(), "old_logprobs": far(), "reference_logprobs": far()}
    fields |= {name: getattr(world.batch, name).to(dtype) for name in ("rewards", "scores", "old_entropy")}
    far_world = World(replace(world.batch, **fields), far(), world.entropy.to(dtype))
    output = whole_step(objective, far_world)
    assert torch.isfinite(output.loss)
    assert torch.isfinite(output.logprobs).all()
    assert output.logprobs.dtype == dtype
    assert torch.inf not in output.rates.compute().values()


@QUICK
@given(objectives(divergence=None, entropy_coefficient=0.0), worlds(gaps=(0.0,)))
def test_at_ratio_one_every_surrogate_is_the_policy_gradient(objective, world):
    # All gaps are 0: d f / d logp = A per token, so the gradient of the loss is -w m A. The product ratio of a sequence
    # appears in each of its tokens' values, so it has the policy gradient times the length.
    batch = prepare(objective, world.batch)
    output = step(objective, world, batch, [torch.arange(len(batch.lengths))])
    expected = torch.zeros_like(world.logprobs)
    per_token = -(batch.weights * batch.advantages)[batch.sequence]
    if objective.surrogate == SequenceClip(0.2, 0.3, "product"):
        per_token = per_token * batch.lengths[batch.sequence]
    if batch.selected is not None:
        per_token = per_token * batch.selected
    expected[batch.token_ids] = per_token
    torch.testing.assert_close(output.logprobs, expected, rtol=1e-10, atol=1e-12)


def mixtures() -> list[dict[str, object]]:
    """Every surrogate with every divergence, the other parts in turn, without those that are refused."""
    turns = {name: itertools.cycle(PARTS[name]) for name in PARTS if name not in ("surrogate", "divergence")}
    accepted = []
    for surrogate, divergence in itertools.product(SURROGATES, DIVERGENCES):
        chosen = {"surrogate": surrogate, "divergence": divergence, **{name: next(t) for name, t in turns.items()}}
        with suppress(ConfigError):
            Objective(**chosen)
            accepted.append(chosen)
    return accepted


def test_every_surrogate_with_every_divergence_is_free_of_the_split():
    # The suite above samples mixtures; this goes through them in order, and sees that each part takes part.
    world = random_world([3, 3], [1, 3, 0, 2, 4, 1], [1.0, 0.0, 0.0, 0.5, 0.5, 0.0], gap=0.5, seed=0)
    accepted = mixtures()
    for chosen in accepted:
        objective = Objective(**chosen)
        batch = prepare(objective, world.batch)
        pieces = torch.arange(len(batch.lengths)).flip(0).split(3)
        assert_same(step(objective, world, batch, pieces), whole_step(objective, world))
    for name, members in PARTS.items():
        assert all(any(chosen[name] == member for chosen in accepted) for member in members), name
