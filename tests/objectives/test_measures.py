import math

import pytest
import torch

from grpo_lit.objectives import (
    K3,
    Objective,
    OffPolicySequenceMask,
    SequenceMaskedIS,
    TopEntropy,
    TruncatedIS,
)
from grpo_lit.objectives.measures import derived


def rates(make_batch, objective, advantages=(1.0, -1.0), **override):
    tokens = 3
    fields = {
        "lengths": [2, 1],
        "advantages": torch.tensor(advantages),
        "weights": torch.ones(2),
        "old_logprobs": torch.full((tokens,), -1.0),
        "sampler_logprobs": torch.full((tokens,), -1.0),
        "reference_logprobs": torch.full((tokens,), -1.0),
        **override,
    }
    return objective.loss(make_batch([1, 0], **fields), torch.full((tokens,), -1.0), torch.ones(tokens)).rates


def test_the_raw_ratio_to_the_sampler_by_hand(make_batch):
    # Ratios 4 1 1: |log| mean ln4 / 3, k3 (4 - ln4 - 1) / 3, chi-square (16 + 1 + 1) / 3 - 1 = 5.
    sampler = torch.tensor([-1.0 - math.log(4), -1.0, -1.0])
    values = rates(make_batch, Objective(), sampler_logprobs=sampler).compute()
    assert values["system/mismatch_abs"] == pytest.approx(math.log(4) / 3)
    assert values["system/mismatch_kl"] == pytest.approx((3 - math.log(4)) / 3)
    assert values["system/mismatch_chi2"] == pytest.approx(5.0, rel=1e-5)


def test_every_correction_tells_its_cut_sample_size_and_raw_ratio(make_batch):
    # Token ratios 4 1 1: TIS with cap 2 weighs 2 1 1: cut 1/3, ESS (4/3)^2 / (6/3) = 8/9. The sequence band [.5, 1.5]
    # by geometric mean cuts the first sequence (ratio 2), weights 0 0 1: cut 2/3, ESS (1/3)^2 / (1/3) = 1/3. Together
    # 0 0 1. Raw sequence ratio 2 2 1: chi-square (4 + 4 + 1) / 3 - 1 = 2.
    objective = Objective(corrections=[TruncatedIS(2.0), SequenceMaskedIS(0.5, 1.5, kept="one")])
    sampler = torch.tensor([-1.0 - math.log(4), -1.0, -1.0])
    values = objective.derived(rates(make_batch, objective, sampler_logprobs=sampler).compute())
    for name, value in {
        "system/is_cut": 2 / 3,
        "system/is_cut_TruncatedIS": 1 / 3,
        "system/is_cut_SequenceMaskedIS": 2 / 3,
        "system/ess": 1 / 3,
        "system/ess_TruncatedIS": 8 / 9,
        "system/ess_SequenceMaskedIS": 1 / 3,
        "system/is_chi2_TruncatedIS": 5.0,
        "system/is_chi2_SequenceMaskedIS": 2.0,
        "system/is_k3_SequenceMaskedIS": 2 * (2 - math.log(2) - 1) / 3,
    }.items():
        assert values[name] == pytest.approx(value, rel=1e-5), name
    assert not any(name.startswith("_") for name in values)


def test_all_cut_is_a_sample_of_size_zero(make_batch):
    objective = Objective(corrections=[OffPolicySequenceMask(0.1)])
    sampler = torch.zeros(3)
    values = objective.derived(rates(make_batch, objective, (-1.0, -1.0), sampler_logprobs=sampler).compute())
    assert values["system/ess"] == 0.0
    assert values["system/is_cut"] == 1.0


def test_effective_sample_size_is_exact_over_micro_batches(make_batch):
    # Weights 2 1 1 in one piece and in two: sums, not means of sample sizes.
    objective = Objective(corrections=[TruncatedIS(9.0)])
    sampler = torch.tensor([-1.0 - math.log(2), -1.0, -1.0])
    whole = rates(make_batch, objective, sampler_logprobs=sampler)
    full = objective.derived(whole.compute())
    other = rates(make_batch, objective)
    both = objective.derived(whole.merge(other).compute())
    assert full["system/ess"] == pytest.approx((4 / 3) ** 2 / 2)
    assert both["system/ess"] == pytest.approx((7 / 6) ** 2 / (9 / 6))


@pytest.mark.parametrize(
    "objective",
    [
        Objective(),
        Objective(divergence=K3(), corrections=[TruncatedIS(), OffPolicySequenceMask()]),
        Objective(selection=TopEntropy()),
    ],
)
def test_names_depend_on_the_recipe_only(make_batch, objective):
    # Ranks add their sums as one vector: a rank without a token must bring the same names.
    chosen = torch.tensor([True, False, True])
    full = rates(make_batch, objective, selected=chosen)
    nothing = make_batch(
        [],
        lengths=[],
        advantages=torch.zeros(0),
        weights=torch.zeros(0),
        reference_logprobs=torch.zeros(0),
        selected=chosen[:0],
    )
    empty = objective.loss(nothing, torch.zeros(0), torch.zeros(0)).rates
    assert set(full.compute()) == set(empty.compute())
    assert full.merge(empty).compute() == pytest.approx(full.compute())


def test_metrics_of_far_ratios_are_finite(make_batch):
    objective = Objective(corrections=[TruncatedIS(), OffPolicySequenceMask()])
    for old, sampler in ((-101.0, -1.0), (-1.0, -101.0)):
        values = rates(
            make_batch,
            objective,
            old_logprobs=torch.full((3,), old),
            sampler_logprobs=torch.full((3,), sampler),
        ).compute()
        assert all(math.isfinite(value) for value in values.values())


@pytest.mark.parametrize("bonus", [0.0, 0.1])
def test_rates_are_over_the_sequences_that_the_task_moves_whatever_else_is_at_hand(make_batch, bonus):
    # Two tokens of a sequence with an advantage, entropy 1; one of a sequence without, entropy 4. The second goes
    # through the policy for an entropy bonus or a shadow, and comes and goes with them: a controller must not read it.
    batch = make_batch([1, 0], lengths=[2, 1], advantages=torch.tensor([1.0, 0.0]), weights=torch.ones(2))
    values = (
        Objective(entropy_coefficient=bonus).loss(batch, -torch.ones(3), torch.tensor([1.0, 1.0, 4.0])).rates.compute()
    )
    assert values["exploration/entropy"] == 1.0


def test_rates_count_the_sequences_that_only_pay_kl(make_batch):
    batch = make_batch(
        [1, 0],
        lengths=[2, 1],
        advantages=torch.tensor([1.0, 0.0]),
        weights=torch.ones(2),
        reference_logprobs=torch.full((3,), -1.0),
    )
    values = (
        Objective(divergence=K3(beta=0.1)).loss(batch, -torch.ones(3), torch.tensor([1.0, 1.0, 4.0])).rates.compute()
    )
    assert values["exploration/entropy"] == 2.0


def test_derived_of_nothing_is_not_a_number():
    values = derived({"a": 1.0, "_is_weight": math.nan, "_is_weight_squared": math.nan})
    assert values["a"] == 1.0
    assert math.isnan(values["system/ess"])
    assert derived({"_other": 1.0}) == {}
