import math

import pytest
import torch

from grpo_lit.errors import ConfigError
from grpo_lit.objectives import (
    MaskedIS,
    OffPolicySequenceMask,
    SequenceMaskedIS,
    SequenceTruncatedIS,
    TruncatedIS,
)

# logp_old - logp_sampler of sequences of 2 and 1 tokens: token ratios 1.5 4 | .25, geometric sqrt(6) | .25, product 6.
RATIOS = [1.5, 4.0, 0.25]


@pytest.fixture
def terms(make_terms, dtype):
    gaps = torch.tensor([math.log(r) for r in RATIOS], dtype=dtype)
    return make_terms([0.0] * 3, [1.0, -1.0], lengths=[2, 1], dtype=dtype, sampler_logprobs=-1.0 - gaps)


@pytest.mark.parametrize(
    ("part", "weight", "cut"),
    [
        (TruncatedIS(2.0), [1.5, 2.0, 0.25], [0, 1, 0]),
        (TruncatedIS(9.0), [1.5, 4.0, 0.25], [0, 0, 0]),
        (SequenceTruncatedIS(2.0), [2.0, 2.0, 0.25], [1, 1, 0]),
        (SequenceTruncatedIS(9.0), [6.0, 6.0, 0.25], [0, 0, 0]),
        (SequenceTruncatedIS(9.0, "geometric"), [math.sqrt(6)] * 2 + [0.25], [0, 0, 0]),
        (MaskedIS(0.5, 2.0), [1.5, 0.0, 0.0], [0, 1, 1]),
        (MaskedIS(0.2, 5.0), [1.5, 4.0, 0.25], [0, 0, 0]),
        (MaskedIS(0.5, 2.0, kept="one"), [1.0, 0.0, 0.0], [0, 1, 1]),
        (SequenceMaskedIS(0.5, 2.0), [0.0, 0.0, 0.0], [1, 1, 1]),
        (SequenceMaskedIS(0.5, 2.5), [math.sqrt(6)] * 2 + [0.0], [0, 0, 1]),
        (SequenceMaskedIS(0.2, 5.0, "product"), [0.0, 0.0, 0.25], [1, 1, 0]),
        (SequenceMaskedIS(0.2, 2.5, kept="one"), [1.0, 1.0, 1.0], [0, 0, 0]),
    ],
    ids=repr,
)
def test_importance_weights_by_hand(terms, part, weight, cut):
    out = part(terms)
    torch.testing.assert_close(out.weight, torch.tensor(weight, dtype=terms.logprobs.dtype))
    assert out.cut.tolist() == [bool(c) for c in cut]
    assert not out.weight.requires_grad
    whole = isinstance(part, (SequenceTruncatedIS, SequenceMaskedIS))
    first = (math.log(6) if part.ratio == "product" else math.log(6) / 2) if whole else math.log(1.5)
    assert out.log_ratio[0].item() == pytest.approx(first, rel=1e-6)
    assert part.pays_sampler_ratio is (getattr(part, "kept", "ratio") == "ratio")


@pytest.mark.parametrize("behaviour", ["sampler", "old"])
def test_off_policy_mask_by_hand(make_terms, dtype, behaviour):
    # Falls of the log-prob per token, meaned: (.3 + .1) / 2 = .2 in each of the first two, -.4, and .05. Bound .1: only
    # the first, which is bad (A < 0) and unlikely now, goes.
    d = torch.tensor([-0.3, -0.1, -0.3, -0.1, 0.4, -0.05], dtype=dtype)
    base = torch.full_like(d, -1.0)
    elsewhere = torch.full_like(d, -1e3)
    fields = {"sampler_logprobs": base, "old_logprobs": elsewhere}
    if behaviour == "old":
        fields = {"sampler_logprobs": elsewhere, "old_logprobs": base}
    terms = make_terms(
        [0.0] * 6,
        [-1.0, 1.0, -1.0, -1.0],
        lengths=[2, 2, 1, 1],
        dtype=dtype,
        logprobs=(base + d).requires_grad_(),
        **fields,
    )
    out = OffPolicySequenceMask(0.1, behaviour)(terms)
    assert out.weight.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert out.cut.tolist() == [True, True, False, False, False, False]
    torch.testing.assert_close(out.log_ratio, torch.tensor([-0.2, -0.2, -0.2, -0.2, 0.4, -0.05], dtype=dtype))
    assert not out.weight.requires_grad


def test_off_policy_mask_keeps_what_lies_on_the_bound(make_terms):
    terms = make_terms([-0.5], [-1.0])
    assert OffPolicySequenceMask(0.5)(terms).weight.item() == 1.0
    assert OffPolicySequenceMask(0.49)(terms).weight.item() == 0.0


ALL = [
    TruncatedIS(),
    SequenceTruncatedIS(),
    SequenceTruncatedIS(ratio="geometric"),
    MaskedIS(),
    SequenceMaskedIS(),
    SequenceMaskedIS(ratio="product"),
    OffPolicySequenceMask(),
]


@pytest.mark.parametrize("part", ALL, ids=repr)
def test_the_same_sampler_is_left_alone(make_terms, dtype, part):
    out = part(make_terms([0.0] * 3, [1.0, -1.0], lengths=[2, 1], dtype=dtype))
    assert out.weight.tolist() == [1.0, 1.0, 1.0]
    assert not out.cut.any()


@pytest.mark.parametrize("part", ALL, ids=repr)
@pytest.mark.parametrize("gap", [-100.0, 100.0])
def test_any_gap_gives_a_finite_factor(make_terms, dtype, part, gap):
    sampler = torch.full((300,), -1.0 - gap, dtype=dtype)
    out = part(make_terms([0.0] * 300, [-1.0], lengths=[300], dtype=dtype, sampler_logprobs=sampler))
    assert torch.isfinite(out.weight).all()


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: TruncatedIS(0.5), "`cap` of TruncatedIS"),
        (lambda: SequenceTruncatedIS(float("nan")), "`cap` of SequenceTruncatedIS"),
        (lambda: MaskedIS(1.5, 2.0), "`low` and `high` of MaskedIS"),
        (lambda: SequenceMaskedIS(0.5, 0.9), "`low` and `high` of SequenceMaskedIS"),
        (lambda: OffPolicySequenceMask(-0.1), "`delta` of OffPolicySequenceMask"),
    ],
)
def test_bounds_that_cut_on_policy_tokens_are_refused(make, key):
    with pytest.raises(ConfigError, match=key):
        make()
