"""Curves over optimizer steps, or over what a run has spent so far."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

from grpo_lit.errors import ConfigError
from grpo_lit.metrics.names import is_held_out
from grpo_lit.report.events import Scalars

#: x and y of each metric.
Curves = dict[str, tuple[list[float], list[float]]]


def along(scalars: Scalars, metric: str | None) -> Curves:
    """Return the metrics over optimizer steps, or over a cumulative count.

    The count is logged at the step whose rollout it includes: what a step logs has cost the last count logged up to
    it, and a held-out figure measured at step s the last one logged before s, 0 if there is none.

    Args:
        scalars: Of a run.
        metric: A count that never falls, such as ``system/tokens_sampled``; ``None``: optimizer steps.

    Raises:
        ConfigError: The run has no such metric, or it falls.
    """
    if metric is None:
        return {name: ([float(step) for step in steps], values) for name, (steps, values) in scalars.items()}
    if metric not in scalars:
        raise ConfigError(f"`over` expected a metric that every run has, but got {metric}")
    steps, counts = scalars[metric]
    if any(later < earlier for earlier, later in pairwise(counts)):
        raise ConfigError(
            f"`over` expected a count that never falls, such as system/tokens_sampled, but got {metric}, which falls"
        )

    def spent(name: str, step: int) -> float:
        place = bisect_left(steps, step) if is_held_out(name) else bisect_right(steps, step)
        return counts[place - 1] if place else 0.0

    return {name: ([spent(name, s) for s in ss], values) for name, (ss, values) in scalars.items()}


def value_at(x: Sequence[float], y: Sequence[float], where: float) -> float:
    """Return the value at ``where``, linear between its neighbours.

    Where several values share an x, the last of them stands.

    Raises:
        ValueError: ``where`` is outside of what was measured.
    """
    if not x or not x[0] <= where <= x[-1]:
        raise ValueError(f"{where} is not within the measured range")
    right = bisect_right(x, where)
    if x[right - 1] == where:
        return y[right - 1]
    share = (where - x[right - 1]) / (x[right] - x[right - 1])
    return y[right - 1] + share * (y[right] - y[right - 1])


def reached_by_all(curves: Sequence[Curves], name: str) -> float | None:
    """Return the largest x at which every run has a value of a metric; ``None`` where there is no such x."""
    if not all(name in run for run in curves):
        return None
    first, last = max(run[name][0][0] for run in curves), min(run[name][0][-1] for run in curves)
    return last if first <= last else None
