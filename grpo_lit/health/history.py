"""What a run has logged so far, by metric, as rules read it."""

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


class History:
    """Steps and finite values of every metric, one value per step.

    A value is kept as an event file holds it, a float32 written with six digits: what is found during a run is then
    found again in its files, and a value of exactly 0.8 is not above a threshold of 0.8.
    """

    def __init__(self) -> None:
        self._points: dict[str, tuple[list[int], list[float]]] = {}

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add values of a step. One that was logged before is replaced, and what came after it forgotten.

        Args:
            step: Optimizer steps that the weights have had.
            values: By metric; those that are not finite are left out.
        """
        for name, value in values.items():
            value = float(f"{float(np.float32(value)):.6g}")
            if not math.isfinite(value):
                continue
            steps, known = self._points.setdefault(name, ([], []))
            if steps and step <= steps[-1]:  # a resumed run goes over the steps after its checkpoint again
                cut = bisect_left(steps, step)
                del steps[cut:], known[cut:]
            steps.append(step)
            known.append(value)

    def names(self, prefix: str = "") -> list[str]:
        """Return the metrics whose name starts so, sorted."""
        return sorted(name for name in self._points if name.startswith(prefix))

    def points(self, name: str) -> tuple[Sequence[int], Sequence[float]]:
        """Return steps and values of a metric, oldest first; two empty lists for an unknown one."""
        return self._points.get(name, ([], []))

    def newest(self, name: str, count: int, before: int = 0) -> list[float]:
        """Return ``count`` values in a row, oldest first; nothing where there are not as many.

        Args:
            name: The metric.
            count: How many.
            before: How many newer ones to leave out.
        """
        values = self.points(name)[1]
        end = len(values) - before
        return list(values[end - count : end]) if end >= count else []

    def oldest(self, name: str, count: int) -> list[float]:
        """Return the first ``count`` values; nothing where there are not as many."""
        values = self.points(name)[1]
        return list(values[:count]) if len(values) >= count else []

    def between(self, name: str, first: int, last: int) -> list[float]:
        """Return the values at steps ``first`` to ``last``."""
        steps, values = self.points(name)
        return list(values[bisect_left(steps, first) : bisect_left(steps, last + 1)])

    @property
    def last_step(self) -> int:
        """The newest step with a value; -1 without any."""
        return max((steps[-1] for steps, _ in self._points.values()), default=-1)

    def state_dict(self) -> dict[str, Any]:
        """Return everything, in plain types."""
        return {name: [list(steps), list(values)] for name, (steps, values) in self._points.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned."""
        self._points = {name: (list(steps), list(values)) for name, (steps, values) in state.items()}


def median(values: Iterable[float]) -> float:
    """Return the median; NaN of nothing, which is neither above nor below any threshold."""
    values = list(values)
    return statistics.median(values) if values else math.nan


def upper_quartile(values: Sequence[float]) -> float:
    """Return what a quarter of the values lies above; NaN of nothing.

    For what is 0 at every other step by its nature: the first update on a rollout never clips.
    """
    if len(values) < 2:
        return median(values)
    return statistics.quantiles(values, n=4, method="inclusive")[2]
