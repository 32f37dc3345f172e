"""What a value has cost, and values at equal cost."""

import pytest

from grpo_lit.errors import ConfigError
from grpo_lit.report.axis import along, reached_by_all, value_at

TOKENS = "system/tokens_sampled"


def test_a_held_out_value_has_cost_what_was_sampled_before_it() -> None:
    scalars = {
        TOKENS: ([0, 2, 4], [100.0, 300.0, 600.0]),  # two updates per rollout
        "reward/total": ([0, 1, 2, 3, 4], [0.0, 0.1, 0.2, 0.3, 0.4]),
        "val/s/greedy": ([0, 2, 3, 5], [0.1, 0.2, 0.3, 0.4]),
    }
    curves = along(scalars, TOKENS)
    # Step s trains on the rollout that step s logs; the weights after s steps have cost the rollouts before s.
    assert curves["reward/total"][0] == [100.0, 100.0, 300.0, 300.0, 600.0]
    assert curves["val/s/greedy"][0] == [0.0, 100.0, 300.0, 600.0]
    assert curves["val/s/greedy"][1] == [0.1, 0.2, 0.3, 0.4]
    assert along(scalars, None)["val/s/greedy"][0] == [0.0, 2.0, 3.0, 5.0]


@pytest.mark.parametrize("counts", [None, [100.0, 300.0, 200.0]])
def test_what_is_missing_or_falls_is_no_axis(counts: list[float] | None) -> None:
    scalars = {"reward/total": ([0], [1.0])} | ({} if counts is None else {TOKENS: ([0, 1, 2], counts)})
    with pytest.raises(ConfigError, match=r"`over` expected .*tokens_sampled"):
        along(scalars, TOKENS)


@pytest.mark.parametrize(("where", "expected"), [(0.0, 1.0), (2.5, 1.5), (10.0, 3.0), (20.0, 5.0)])
def test_values_between_measurements_are_linear(where: float, expected: float) -> None:
    # (0, 1), (10, 3) twice, (20, 5): slope 1/5.
    assert value_at([0.0, 10.0, 10.0, 20.0], [1.0, 3.0, 3.0, 5.0], where) == expected


def test_where_several_values_share_a_place_the_last_stands() -> None:
    assert value_at([0.0, 10.0, 10.0], [1.0, 2.0, 9.0], 10.0) == 9.0
    assert value_at([0.0, 10.0, 10.0], [1.0, 2.0, 9.0], 5.0) == 1.5


@pytest.mark.parametrize("where", [-1.0, 21.0])
def test_nothing_is_made_up_outside_of_what_was_measured(where: float) -> None:
    with pytest.raises(ValueError, match="measured range"):
        value_at([0.0, 20.0], [1.0, 5.0], where)


def test_the_place_that_all_runs_reached() -> None:
    runs = [{"a": ([0.0, 30.0], [0.0, 1.0])}, {"a": ([5.0, 20.0], [0.0, 1.0]), "b": ([0.0], [0.0])}]
    assert reached_by_all(runs, "a") == 20.0
    assert reached_by_all(runs, "b") is None
    assert reached_by_all([runs[0], {"a": ([40.0], [0.0])}], "a") is None
