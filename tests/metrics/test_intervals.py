"""Intervals against printed tables and by hand."""

import pytest

from grpo_lit.metrics.intervals import t_interval, t_quantile, wilson


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (30, 2.042)]
)
def test_quantiles_of_students_distribution(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, abs=5e-4)  # any printed table, two-sided 95 %


def test_the_interval_of_a_mean() -> None:
    # Mean 2, std 1, n 3: 2 -+ 4.3027 / sqrt(3).
    assert t_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert t_interval([2.0, 2.0]) == (2.0, 2.0)
    with pytest.raises(ValueError, match="two values"):
        t_interval([1.0])


@pytest.mark.parametrize("trials", range(1, 60))
def test_no_end_passes_the_share(trials: int) -> None:
    """Of 5 trials without success rounding had made 3e-17 of the lower end."""
    assert wilson(0.0, trials)[0] == 0.0
    assert wilson(1.0, trials)[1] == 1.0


def test_wilsons_interval() -> None:
    # n 10, p 0: (0, z^2 / (n + z^2)) with z^2 = 3.8415; p 1/2: symmetric, half-width z sqrt(n + z^2) / 2 (n + z^2).
    assert wilson(0.0, 10) == pytest.approx((0.0, 3.8415 / 13.8415), abs=1e-4)
    low, high = wilson(0.5, 10)
    assert (low + high, high - low) == pytest.approx((1.0, 1.95996 / 13.8415**0.5), abs=1e-4)
    assert wilson(0.9, 1000)[1] - wilson(0.9, 1000)[0] < wilson(0.9, 100)[1] - wilson(0.9, 100)[0]
    for share, trials in ((0.5, 0), (1.5, 10)):
        with pytest.raises(ValueError, match="at least one trial"):
            wilson(share, trials)
