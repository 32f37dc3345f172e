from types import SimpleNamespace

import pytest

from grpo_lit.errors import ConfigError
from grpo_lit.objectives import (
    DPPO,
    K1,
    K3,
    CappedRatio,
    GDPOAdvantage,
    GeometricMean,
    MaskedIS,
    Objective,
    OffPolicySequenceMask,
    SequenceClip,
    SequenceMaskedIS,
    SequenceTokenClip,
    SequenceTruncatedIS,
    TopEntropy,
    TruncatedIS,
)
from grpo_lit.objectives.checks import meet_rewards


@pytest.mark.parametrize(
    ("parts", "first", "second"),
    [
        ({"corrections": [TruncatedIS(), MaskedIS()]}, "TruncatedIS", "MaskedIS"),
        ({"corrections": [SequenceTruncatedIS(), TruncatedIS()]}, "SequenceTruncatedIS", "TruncatedIS"),
        ({"corrections": [MaskedIS(), SequenceMaskedIS()]}, "MaskedIS", "SequenceMaskedIS"),
        ({"surrogate": DPPO(), "corrections": [TruncatedIS()]}, "DPPO", "TruncatedIS"),
        ({"surrogate": SequenceClip(), "selection": TopEntropy()}, "TopEntropy", "SequenceClip"),
        ({"surrogate": GeometricMean(), "selection": TopEntropy()}, "TopEntropy", "GeometricMean"),
        ({"advantage": GDPOAdvantage(), "divergence": K1(place="reward")}, "K1", "GDPOAdvantage"),
        ({"corrections": [MaskedIS(kept="one"), MaskedIS(kept="one", low=0.9)]}, "corrections", "MaskedIS twice"),
    ],
)
def test_contradictions_are_refused_with_both_parts_named(parts, first, second):
    with pytest.raises(ConfigError) as error:
        Objective(**parts)
    assert first in str(error.value)
    assert second in str(error.value)


@pytest.mark.parametrize(
    "parts",
    [
        {"corrections": [TruncatedIS(), SequenceMaskedIS(kept="one"), OffPolicySequenceMask()]},
        {"surrogate": DPPO(anchor="old"), "corrections": [TruncatedIS()]},
        {"surrogate": DPPO(), "corrections": [MaskedIS(kept="one"), OffPolicySequenceMask()]},
        {"surrogate": SequenceTokenClip(), "selection": TopEntropy()},
        {"surrogate": CappedRatio(), "selection": TopEntropy()},
        {"advantage": GDPOAdvantage(), "divergence": K3()},
        {"divergence": K1(place="reward")},
        {"divergence": K3(beta=0.0, weighting="ratio")},
    ],
)
def test_neighbouring_mixtures_are_fine(parts):
    objective = Objective(**parts)
    for name, part in parts.items():
        assert getattr(objective, name) == (tuple(part) if isinstance(part, list) else part)


def test_gdpo_weighs_scores_as_the_rewards_are_weighed_unless_told_otherwise():
    rewards = {
        "answer": SimpleNamespace(weight=2.0, conditional=False),
        "form": SimpleNamespace(weight=0.5, conditional=False),
    }
    plain, told = GDPOAdvantage(), GDPOAdvantage(weights={"answer": 3.0})
    for advantage in (plain, told):
        meet_rewards(Objective(advantage=advantage), rewards)
    assert plain.weights == {"answer": 2.0, "form": 0.5}
    assert told.weights == {"answer": 3.0}


def test_a_conditional_reward_is_for_advantages_of_the_total():
    rewards = {"form": SimpleNamespace(weight=1.0, conditional=True)}
    meet_rewards(Objective(), rewards)
    with pytest.raises(ConfigError, match=r"`GDPOAdvantage` and `data.rewards.rewards.form.conditional` contradict"):
        meet_rewards(Objective(advantage=GDPOAdvantage()), rewards)
