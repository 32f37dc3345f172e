"""Applies rules step by step: the same during a run and over its event files afterwards."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lit.health.history import History
from grpo_lit.health.rule import Event, Rule

#: Looks in a row without a finding after which an episode is over, and the next finding is news: as long as the
#: windows of most rules, so that a value that swings about its threshold is told once.
REST = 10


class Monitor:
    """A run's history and the episodes of sickness in it.

    Args:
        rules: To apply.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = list(rules)
        self.history = History()
        self._reads = tuple(prefix for rule in rules for prefix in rule.reads)
        self._healthy_for: dict[tuple[str, str], int] = {}  # open episodes by rule and metric
        self._is_new = False

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Take in what is logged of a step; metrics that no rule reads are left out.

        Args:
            step: Optimizer steps that the weights have had.
            values: By metric.
        """
        read = {name: value for name, value in values.items() if name.startswith(self._reads)}
        self.history.add(step, read)
        self._is_new |= bool(read)

    def look(self) -> list[Event]:
        """Return the episodes that begin with what was added since the last look."""
        if not self._is_new:
            return []
        self._is_new = False
        found = {(rule.name, f.metric): (rule, f) for rule in self.rules for f in rule.find(self.history)}
        step = self.history.last_step
        news = [
            Event(rule.name, step, f.metric, f.value, f.threshold, f.symptom, rule.causes, rule.checks)
            for episode, (rule, f) in found.items()
            if episode not in self._healthy_for
        ]
        healthy = {e: n + 1 for e, n in self._healthy_for.items() if e not in found and n + 1 < REST}
        self._healthy_for = healthy | dict.fromkeys(found, 0)
        return news

    def state_dict(self) -> dict[str, Any]:
        """Return history and open episodes, in plain types."""
        episodes = [[rule, metric, count] for (rule, metric), count in self._healthy_for.items()]
        return {"history": self.history.state_dict(), "episodes": episodes, "is_new": self._is_new}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.history.load_state_dict(state["history"])
        self._healthy_for = {(rule, metric): count for rule, metric, count in state["episodes"]}
        self._is_new = state["is_new"]


def diagnose(scalars: Mapping[str, tuple[Sequence[int], Sequence[float]]], rules: Sequence[Rule]) -> list[Event]:
    """Return every episode of a run, in the order in which they begin.

    Args:
        scalars: Steps and values of each metric. Where a step was logged twice, the later value counts, as in a run
            that was resumed in the same folder.
        rules: To apply.
    """
    by_step: dict[int, dict[str, float]] = {}
    for name, (steps, values) in scalars.items():
        for step, value in zip(steps, values, strict=True):
            by_step.setdefault(step, {})[name] = value
    monitor, events = Monitor(rules), list[Event]()
    for step in sorted(by_step):
        monitor.add(step, by_step[step])
        events += monitor.look()
    return events
