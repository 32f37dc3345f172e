"""What counts as a group with signal."""

import pytest

from grpo_lit.metrics.rollout import has_signal


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.1] * 8, False),  # field bug A1: float32 std 8e-9, "std > 0" keeps the group
        ([0.9] * 3, False),
        ([0.1 + 0.2, 0.3, 0.3, 0.3], False),  # float64 std 5.6e-17
        ([1e6 + 0.1, 1e6 + 0.1], False),
        ([0.35] * 7 + [0.0], True),
        ([0.3, 0.301], True),
        ([None, None, None, 1.0], False),  # field bug A2: one survivor is no comparison
        ([None, None], False),
        ([None, 0.0, 1.0], True),
        ([True, True, None], False),
        ([True, False], True),
        ([], False),
    ],
)
def test_signal_is_a_difference_that_is_more_than_rounding(values: list[float | bool | None], expected: bool) -> None:
    assert has_signal(values) is expected
