import math
from dataclasses import replace

import pytest
import torch

from grpo_lit.errors import ConfigError
from grpo_lit.metrics.rates import Rates
from grpo_lit.objectives import (
    CISPO,
    K1,
    K3,
    Counts,
    GroupAdvantage,
    Objective,
    OverlongFilter,
    SequenceMean,
    Shadows,
    TokenMean,
    TopEntropy,
)

TRAINED = Objective(GroupAdvantage("none"), reduction=TokenMean())


def prepared(shadows, batch, trained=TRAINED):
    """A batch with everybody's advantages and weights."""
    batch = replace(batch, advantages=trained.advantages(batch, lambda x: x))
    batch = shadows.with_advantages(batch, lambda x: x)
    batch = replace(batch, weights=trained.weights(batch, Counts.of(batch, lambda x: x)))
    return shadows.with_weights(batch, lambda x: x)


def measured(shadows, batch, pieces=None, trained=TRAINED):
    pieces = [torch.arange(len(batch.lengths))] if pieces is None else pieces
    rates = Rates()
    for piece in pieces:
        micro = batch.select(piece)
        logprobs = torch.full((micro.tokens,), -1.0)
        rates.merge(shadows.measure(trained, micro, logprobs, torch.zeros(micro.tokens)))
    return shadows.derived(rates.compute())


def test_cosine_and_norm_by_hand(make_batch):
    # Rewards 1 0, lengths 1 3: A = .5 -.5. Token mean: g = -.5/4 on one token, +.5/4 on three. Sequence mean:
    # -.5/2 on one, +.5/6 on three. Times 24: g = -3 3 3 3, g_s = -6 2 2 2: dot 36, |g| 6, |g_s| sqrt 48.
    shadows = Shadows({"grpo": Objective(GroupAdvantage("none"), reduction=SequenceMean())})
    values = measured(shadows, prepared(shadows, make_batch([1, 0], lengths=[1, 3])))
    assert values["shadow/cosine_grpo"] == pytest.approx(36 / (6 * math.sqrt(48)))
    assert values["shadow/norm_grpo"] == pytest.approx(math.sqrt(48) / 6)


def test_a_shadow_of_oneself_has_cosine_and_norm_one(make_batch):
    shadows = Shadows({"same": TRAINED, "std": Objective(GroupAdvantage(), reduction=TokenMean())})
    values = measured(shadows, prepared(shadows, make_batch([1, 0, 0], lengths=[2, 1, 3])))
    assert values["shadow/cosine_same"] == pytest.approx(1.0)
    assert values["shadow/norm_same"] == pytest.approx(1.0)
    # One group: dividing by its std changes the length of the step and not its direction.
    assert values["shadow/cosine_std"] == pytest.approx(1.0)
    assert values["shadow/norm_std"] == pytest.approx(1 / (math.sqrt(1 / 3) + 1e-4))


def test_micro_batches_change_nothing(make_batch):
    shadows = Shadows({"a": Objective(surrogate=CISPO()), "b": Objective()})
    batch = prepared(shadows, make_batch([1, 0, 0, 3, 1], group=[0, 0, 0, 1, 1], lengths=[2, 1, 3, 1, 2]))
    pieces = [torch.tensor([4, 0]), torch.tensor([2]), torch.tensor([1, 3])]
    assert measured(shadows, batch, pieces) == pytest.approx(measured(shadows, batch))


def test_a_filter_of_a_shadow_counts_as_in_a_run_of_its_own(make_batch):
    filtering = Objective(GroupAdvantage("none"), filters=[OverlongFilter()])
    batch = prepared(
        Shadows({"dapo": filtering}),
        make_batch([1, 0, 0], lengths=[2, 2, 2], truncated=torch.tensor([False, False, True])),
    )
    assert batch.shadow_weights[:, 0].tolist() == [0.25, 0.25, 0.0]
    # The same as filtering for real.
    alone = filtering.filtered(replace(batch, advantages=batch.shadow_advantages[:, 0]))
    assert filtering.weights(alone, Counts.of(alone, lambda x: x)).tolist() == [0.25, 0.25]


def test_shadows_say_what_they_need(make_batch):
    assert not Shadows({"a": Objective()}).needs_reference
    assert Shadows({"a": Objective(), "b": Objective(divergence=K3())}).needs_reference
    assert Shadows({"a": Objective(divergence=K1(place="reward"))}).needs_reference_before_advantages
    batch = make_batch([1, 1], lengths=[1, 1])
    for divergence, expected in ((None, False), (K3(), True)):
        shadows = Shadows({"a": Objective(divergence=divergence)})
        assert shadows.contributes(prepared(shadows, batch)).tolist() == [expected] * 2


def test_measuring_leaves_the_trained_graph_alone(make_batch):
    shadows = Shadows({"a": Objective()})
    batch = prepared(shadows, make_batch([1, 0]))
    logprobs = torch.full((2,), -1.0, requires_grad=True)
    with torch.no_grad():
        shadows.measure(TRAINED, batch, logprobs, torch.zeros(2))
    assert logprobs.grad is None


def test_no_shadows_log_nothing(make_batch):
    shadows = Shadows({})
    batch = prepared(shadows, make_batch([1, 0]))
    assert batch.shadow_weights.shape == (2, 0)
    assert measured(shadows, batch) == {}


def test_a_step_without_a_gradient_has_no_direction(make_batch):
    shadows = Shadows({"a": Objective()})
    values = measured(shadows, prepared(shadows, make_batch([1, 1])))
    assert all(math.isnan(value) for value in values.values())


def test_a_selection_is_refused():
    with pytest.raises(ConfigError, match=r"'forks'.*TopEntropy"):
        Shadows({"forks": Objective(selection=TopEntropy())})
