"""Intervals of a mean over seeds, and of a share of independent trials."""

import math
import statistics
from collections.abc import Sequence

#: Share of repetitions in which an interval holds the true value.
LEVEL = 0.95


def wilson(share: float, trials: int, level: float = LEVEL) -> tuple[float, float]:
    """Return the Wilson score interval of a share of independent trials.

        (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    It stays within 0 and 1, and is no point at 0 or n successes (Wilson 1927, Brown, Cai and DasGupta 2001).

    Args:
        share: p, the successes over the trials.
        trials: n.
        level: See :data:`LEVEL`.

    Raises:
        ValueError: There are no trials, or the share is none.
    """
    if trials < 1 or not 0 <= share <= 1:
        raise ValueError(f"expected a share of at least one trial, but got {share} of {trials}")
    z = statistics.NormalDist().inv_cdf((1 + level) / 2)
    middle = share + z * z / (2 * trials)
    reach = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # Of 0 successes the lower end is 0, and of n the upper one 1, but for the last digit: no end passes the share.
    return max(0.0, min(share, (middle - reach) / scale)), min(1.0, max(share, (middle + reach) / scale))


def t_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Return the interval of the mean of a few values drawn from a normal distribution.

        mean +- t_(n-1) std / sqrt(n)

    std is the sample's (n - 1), t the quantile of Student's distribution (Student 1908): with three seeds it is 4.3,
    where a normal's would be 2.

    Raises:
        ValueError: There are fewer than two values: one says nothing of how seeds vary.
    """
    if len(values) < 2:
        raise ValueError(f"expected at least two values, but got {len(values)}")
    reach = t_quantile(len(values) - 1, level) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) - reach, statistics.fmean(values) + reach


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """Return t with P(-t < T < t) = level, for Student's T with ``freedom`` degrees, by bisection."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def _within(t: float, freedom: int) -> float:
    """Return P(-t < T < t): a finite sum for whole degrees (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, squared = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= squared * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
