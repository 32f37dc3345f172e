"""Prompts without signal are asked less often, by a rule that every rank and every resumed run shares."""

import pytest

from grpo_lit.data.curriculum import Curriculum, SolveRates
from grpo_lit.errors import ConfigError


def test_only_prompts_without_signal_are_passed_over() -> None:
    rates = SolveRates(Curriculum(revisit=1e-9), seed=0)
    rates.record({"never": 0.0, "always": 1.0, "sometimes": 0.5})
    assert [rates.passes_over(p, 1) for p in ("never", "always", "sometimes", "unknown")] == [True, True, False, False]
    rates.record({"never": 0.25})
    assert not rates.passes_over("never", 2)  # one group with signal brings it back


def test_patience_waits_for_several_groups_in_a_row() -> None:
    rates = SolveRates(Curriculum(revisit=1e-9, patience=2), seed=0)
    for rate, passed in [(0.0, False), (0.0, True), (0.5, False), (1.0, False), (0.0, False), (0.0, True)]:
        rates.record({"a": rate})
        assert rates.passes_over("a", 3) == passed


def test_the_share_that_is_asked_all_the_same_is_revisit() -> None:
    rates = SolveRates(Curriculum(revisit=0.25), seed=0)
    rates.record({str(i): 0.0 for i in range(4000)})
    asked = sum(not rates.passes_over(str(i), 1) for i in range(4000))
    assert asked == pytest.approx(1000, abs=110)  # four standard deviations of a binomial
    assert {rates.passes_over("7", epoch) for epoch in range(60)} == {True, False}  # nobody is passed over for ever
    assert not any(SolveRates(None, seed=0).passes_over(str(i), 1) for i in range(9))


def test_state_survives_a_checkpoint() -> None:
    rates = SolveRates(Curriculum(), seed=0, memory=2)
    for rate in (0.0, 0.5, 1.0):
        rates.record({"a": rate})
    assert rates.history == {"a": [0.5, 1.0]}
    copy = SolveRates(Curriculum(), seed=0, memory=2)
    copy.load_state_dict(rates.state_dict())
    assert copy.history == rates.history


@pytest.mark.parametrize("settings", [{"revisit": 0.0}, {"revisit": 1.5}, {"patience": 0}])
def test_a_curriculum_that_never_returns_is_refused(settings: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Curriculum(**settings)
