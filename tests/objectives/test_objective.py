import math
from dataclasses import replace

import pytest
import torch

from grpo_lit.errors import ConfigError
from grpo_lit.objectives import (
    K1,
    K3,
    Counts,
    GroupAdvantage,
    Objective,
    OffPolicySequenceMask,
    OverlongFilter,
    SequenceMaskedIS,
    SequenceMean,
    TokenClip,
    TokenMean,
    TopEntropy,
    TruncatedIS,
    ZeroSignalFilter,
)


def prepared(objective, batch):
    """What the learner does before micro-batches: advantages, filters, counts, weights."""
    batch = replace(batch, advantages=objective.advantages(batch, lambda x: x))
    batch = objective.filtered(batch)
    return replace(batch, weights=objective.weights(batch, Counts.of(batch, lambda x: x)))


def test_the_defaults_are_grpo():
    objective = Objective()
    assert objective.advantage == GroupAdvantage("group_std")
    assert objective.surrogate == TokenClip(0.2, 0.2)
    assert objective.reduction == SequenceMean()
    assert not objective.needs_reference


def test_a_whole_loss_by_hand(make_batch, dtype):
    # Rewards 1 0, mean only: A = .5 -.5. Lengths 2 1, w = 1/(2 len) = .25 .5. d = .1 0 | -.1, TIS factor e^.2 on the
    # third token only (cap 2), k3 against a reference .3 above logp on the first token, beta .04, entropy bonus .01.
    #   surrogate: .25 (.5 e^.1 + .5) + .5 e^.2 (-.5 e^-.1)      KL: .25 .04 (e^.3 - 1.3)      entropy: .01 w.(2 1 | 4)
    d = torch.tensor([0.1, 0.0, -0.1], dtype=dtype)
    old = torch.full((3,), -1.0, dtype=dtype)
    logprobs = (old + d).requires_grad_()
    batch = make_batch(
        [1, 0],
        lengths=[2, 1],
        dtype=dtype,
        old_logprobs=old,
        sampler_logprobs=torch.tensor([-1.0, -1.0, -1.2], dtype=dtype),
        reference_logprobs=logprobs.detach() + torch.tensor([0.3, 0.0, 0.0], dtype=dtype),
    )
    objective = Objective(
        GroupAdvantage("none"), divergence=K3(0.04), corrections=[TruncatedIS()], entropy_coefficient=0.01
    )
    entropy = torch.tensor([2.0, 1.0, 4.0], dtype=dtype, requires_grad=True)
    output = objective.loss(prepared(objective, batch), logprobs, entropy)
    surrogate = 0.25 * 0.5 * (math.exp(0.1) + 1) - 0.5 * math.exp(0.2) * 0.5 * math.exp(-0.1)
    kl = 0.25 * 0.04 * (math.exp(0.3) - 1.3)
    bonus = 0.01 * (0.25 * 3 + 0.5 * 4)
    assert output.loss.item() == pytest.approx(-surrogate + kl - bonus, rel=1e-5)
    output.loss.backward()
    # d/dlogp: -w c A r + w beta (1 - e^q); d/dH: -.01 w.
    expected = [
        -0.25 * 0.5 * math.exp(0.1) + 0.25 * 0.04 * (1 - math.exp(0.3)),
        -0.25 * 0.5,
        0.5 * math.exp(0.2) * 0.5 * math.exp(-0.1),
    ]
    torch.testing.assert_close(logprobs.grad, torch.tensor(expected, dtype=dtype))
    torch.testing.assert_close(entropy.grad, torch.tensor([-0.0025, -0.0025, -0.005], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_log_probs_are_widened(make_batch, dtype):
    # float16 holds no exp(12): a log-ratio of 12 made inf, and k3 of it NaN in the gradient.
    objective = Objective(divergence=K3(), corrections=[TruncatedIS()], entropy_coefficient=0.01)
    batch = make_batch(
        [1, 0],
        lengths=[2, 1],
        old_logprobs=torch.tensor([-13.0, -1.0, -1.0], dtype=dtype),
        reference_logprobs=torch.tensor([-1.0, -13.0, -100.0], dtype=dtype),
        sampler_logprobs=torch.tensor([-1.0, -13.0, -1.0], dtype=dtype),
    )
    logprobs, entropy = (torch.full((3,), v, dtype=dtype, requires_grad=True) for v in (-1.0, 0.5))
    output = objective.loss(prepared(objective, batch), logprobs, entropy)
    output.loss.backward()
    assert output.loss.dtype == torch.float32
    assert torch.isfinite(output.loss)
    assert torch.isfinite(logprobs.grad).all()
    assert torch.isfinite(entropy.grad).all()


def test_truncated_completions_leave_as_if_absent_yet_stay_in_the_baseline(make_batch):
    # Field bug A4.
    # Rewards 1 0 0, the third truncated: A = 2/3 -1/3 (-1/3), the loss is that of the first two alone: S = 2, T = 8.
    batch = make_batch([1, 0, 0], lengths=[4, 4, 4], truncated=torch.tensor([False, False, True]))
    for reduction in (SequenceMean(), TokenMean()):
        objective = Objective(GroupAdvantage("none"), reduction=reduction, filters=[OverlongFilter()])
        ready = prepared(objective, batch)
        torch.testing.assert_close(ready.advantages, torch.tensor([2 / 3, -1 / 3]))
        torch.testing.assert_close(ready.weights, torch.tensor([1 / 8, 1 / 8]))


def test_everything_filtered_is_a_loss_of_zero_with_a_graph(make_batch):
    # Field bug A4. Other ranks wait in the all-reduce of backward: it must happen here too, and not make a NaN.
    batch = make_batch([1, 0], lengths=[4, 4], truncated=torch.tensor([True, True]))
    objective = Objective(divergence=K3(), filters=[OverlongFilter()], entropy_coefficient=0.1)
    ready = replace(prepared(objective, batch), reference_logprobs=torch.zeros(0))
    logprobs, entropy = torch.zeros(0, requires_grad=True), torch.zeros(0, requires_grad=True)
    output = objective.loss(ready, logprobs, entropy)
    output.loss.backward()
    assert output.loss.item() == 0
    assert logprobs.grad.shape == (0,)


def test_what_a_filter_drops_may_be_anything(make_batch):
    # Field bug A4: masking by multiplication leaves NaN * 0 = NaN. A sequence that is dropped is nowhere.
    nan = torch.tensor([-1.0, -1.0, math.nan, math.nan])
    batch = make_batch([1, 0], lengths=[2, 2], truncated=torch.tensor([False, True]), sampler_logprobs=nan)
    objective = Objective(corrections=[TruncatedIS()], filters=[OverlongFilter()])
    ready, logprobs = prepared(objective, batch), torch.full((2,), -1.0, requires_grad=True)
    output = objective.loss(ready, logprobs, torch.zeros(2))
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert torch.isfinite(logprobs.grad).all()
    assert all(math.isfinite(value) for value in output.rates.compute().values())


def test_no_filter_returns_the_batch_itself(make_batch):
    batch = make_batch([1, 0], advantages=torch.tensor([1.0, -1.0]))
    assert Objective().filtered(batch) is batch
    assert Objective(filters=[ZeroSignalFilter()]).filtered(batch) is batch


def test_filters_add_up(make_batch):
    batch = make_batch(
        [1, 0, 0], advantages=torch.tensor([1.0, 0.0, -1.0]), truncated=torch.tensor([True, False, False])
    )
    kept = Objective(filters=[OverlongFilter(), ZeroSignalFilter()]).filtered(batch)
    assert kept.advantages.tolist() == [-1.0]


@pytest.mark.parametrize("beta", [0.0, {"math": 0.0, "code": 0.0}])
def test_no_reference_where_nobody_pays(beta):
    objective = Objective(divergence=K3(beta))
    assert not objective.needs_reference
    assert not objective.pays_kl_in_loss


def test_who_contributes(make_batch):
    # Zero advantage moves nothing, unless a KL or an entropy bonus does; an empty completion never.
    batch = make_batch(
        [0] * 4,
        lengths=[1, 1, 0, 1],
        advantages=torch.tensor([1.0, 0.0, 1.0, 0.0]),
        domain=torch.tensor([0, 0, 0, 1]),
        domains=("code", "math"),
    )
    assert Objective().contributes(batch).tolist() == [True, False, False, False]
    per_domain = Objective(divergence=K3({"code": 0.0, "math": 0.1}))
    assert per_domain.contributes(batch).tolist() == [True, False, False, True]
    assert Objective(divergence=K3()).contributes(batch).tolist() == [True, True, False, True]
    assert Objective(divergence=K1(place="reward")).contributes(batch).tolist() == [True, False, False, False]
    assert Objective(entropy_coefficient=0.1).contributes(batch).tolist() == [True, True, False, True]


def test_what_does_not_contribute_has_no_gradient(make_batch):
    # A step of groups without signal moves no weight, and with a KL it does: both follow from `contributes`.
    for divergence, moves in ((None, False), (K3(), True)):
        objective = Objective(divergence=divergence)
        batch = make_batch([1, 1, 1, 1], lengths=[2, 1, 3, 1], reference_logprobs=torch.full((7,), -0.5))
        ready = prepared(objective, batch)
        logprobs = torch.full((7,), -1.0, requires_grad=True)
        objective.loss(ready, logprobs, torch.zeros(7)).loss.backward()
        assert bool((logprobs.grad != 0).any()) is moves
        assert bool(objective.contributes(ready).any()) is moves


def test_selected_tokens_alone_train_and_the_counts_stay(make_batch):
    # Entropies .1 .9 | .8 .2, share .5: tokens 1 and 2. TokenMean still divides by 4.
    objective = Objective(GroupAdvantage("none"), reduction=TokenMean(), selection=TopEntropy(0.5))
    assert objective.needs_old_entropy
    batch = prepared(objective, make_batch([1, 0], lengths=[2, 2], old_entropy=torch.tensor([0.1, 0.9, 0.8, 0.2])))
    batch = replace(batch, selected=objective.selected(batch, lambda x: x))
    logprobs = torch.full((4,), -1.0, requires_grad=True)
    output = objective.loss(batch, logprobs, torch.zeros(4))
    output.loss.backward()
    assert logprobs.grad.tolist() == [0.0, -0.125, 0.125, 0.0]
    assert output.rates.compute()["optimization/selected"] == 0.5


def test_a_sequence_without_a_selected_token_needs_no_forward(make_batch):
    batch = make_batch(
        [1, 0], lengths=[1, 2], advantages=torch.tensor([1.0, -1.0]), selected=torch.tensor([False, False, True])
    )
    assert Objective(selection=TopEntropy()).contributes(batch).tolist() == [False, True]
    idle = replace(batch, advantages=torch.zeros(2))
    assert Objective(selection=TopEntropy()).contributes(idle).tolist() == [False, False]
    assert Objective(selection=TopEntropy(), divergence=K3()).contributes(batch).tolist() == [True, True]


def test_kl_in_the_reward_by_hand(make_batch, alone):
    # beta .1, log-ratios to the reference .5 .5 | -1 with lengths 2 1: the rewards 1 0 become .9 .1, mean .5.
    batch = make_batch(
        [1, 0],
        lengths=[2, 1],
        sampler_logprobs=torch.tensor([-1.0, -1.0, -1.0]),
        reference_logprobs=torch.tensor([-1.5, -1.5, 0.0]),
    )
    objective = Objective(GroupAdvantage("none"), divergence=K1(0.1, place="reward"))
    assert objective.needs_reference
    assert objective.needs_reference_before_advantages
    torch.testing.assert_close(objective.advantages(batch, alone), torch.tensor([0.4, -0.4]))
    # The loss itself pays nothing (2 tokens of 1, 1 of -2), and the log still shows the KL: (.5 + .5 - 1) / 3.
    ready = replace(batch, advantages=torch.tensor([1.0, -2.0]), weights=torch.ones(2))
    output = objective.loss(ready, torch.full((3,), -1.0, requires_grad=True), torch.zeros(3))
    assert output.loss.item() == 0
    assert output.rates.compute()["optimization/kl_reference"] == pytest.approx(0.0)
    with pytest.raises(ValueError, match="reference_logprobs"):
        objective.advantages(replace(batch, reference_logprobs=None), alone)


@pytest.mark.parametrize("turned", [False, True])
def test_corrections_multiply_in_any_order(make_batch, turned):
    # Token ratios 3 3 | 1.5 with the cap of 2: 2 2 1.5; the mask leaves the second sequence (geometric 1.5) and cuts
    # the first (3): 0 0 1.5, by the gradient -w c A with w = 1 and A = 1.
    parts = [TruncatedIS(2.0), SequenceMaskedIS(0.5, 2.0, kept="one")]
    objective = Objective(corrections=parts[::-1] if turned else parts)
    batch = make_batch(
        [0, 0],
        lengths=[2, 1],
        advantages=torch.ones(2),
        weights=torch.ones(2),
        sampler_logprobs=-1 - torch.tensor([3.0, 3.0, 1.5]).log(),
    )
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    objective.loss(batch, logprobs, torch.zeros(3)).loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, 0.0, -1.5]))


def test_kl_is_logged_plain_and_as_paid(make_batch):
    # k1 = .5, ratio 1, beta .1, length 2: paid .1 .5 / 2 = .025 per token, logged .5.
    objective = Objective(divergence=K1(0.1, normalise="length"))
    batch = prepared(objective, make_batch([1, 0], lengths=[2, 2], reference_logprobs=torch.full((4,), -1.5)))
    values = objective.loss(batch, torch.full((4,), -1.0), torch.zeros(4)).rates.compute()
    assert values["optimization/kl_reference"] == pytest.approx(0.5)
    assert values["optimization/kl_penalty"] == pytest.approx(0.025)


def test_a_masked_sequence_still_pays_its_kl(make_batch):
    # DeepSeek-V3.2 multiplies the surrogate by the mask and not the KL.
    objective = Objective(divergence=K1(0.1), corrections=[OffPolicySequenceMask()])
    batch = make_batch(
        [0], advantages=torch.tensor([-1.0]), weights=torch.tensor([1.0]), reference_logprobs=torch.tensor([-3.5])
    )
    logprobs = torch.tensor([-3.0], requires_grad=True)
    objective.loss(batch, logprobs, torch.zeros(1)).loss.backward()
    assert logprobs.grad.item() == pytest.approx(0.1)


def test_the_entropy_coefficient_can_be_steered():
    objective = Objective()
    objective.entropy_coefficient = 0.02
    assert objective.entropy_coefficient == 0.02
    for bad in (-0.1, float("nan")):
        with pytest.raises(ConfigError, match="entropy_coefficient"):
            objective.entropy_coefficient = bad
    with pytest.raises(ConfigError, match="entropy_coefficient"):
        Objective(entropy_coefficient=-1.0)
