"""What a rule is, and what it says."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from grpo_lit.health.history import History


@dataclass(frozen=True)
class Finding:
    """What a rule sees now.

    Attributes:
        metric: Where it is seen; findings of one rule on one metric are one episode as long as they follow each other.
        value: The robust statistic that was compared.
        threshold: What it was compared with.
        symptom: One sentence with the figures.
    """

    metric: str
    value: float
    threshold: float
    symptom: str


@dataclass(frozen=True)
class Event:
    """The beginning of an episode.

    Attributes:
        rule: Name of the rule.
        step: Optimizer steps that the weights had had when it was found.
        metric: See :class:`Finding`.
        value: See :class:`Finding`.
        threshold: See :class:`Finding`.
        symptom: What is seen.
        causes: What it likely comes from, the most likely first.
        checks: What to look at or change, keys in backticks.
    """

    rule: str
    step: int
    metric: str
    value: float
    threshold: float
    symptom: str
    causes: tuple[str, ...]
    checks: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain types, for JSON."""
        return asdict(self) | {"causes": list(self.causes), "checks": list(self.checks)}

    def __str__(self) -> str:
        """Return three lines: symptom, causes, checks."""
        return (
            f"step {self.step}: {self.rule.replace('_', ' ')}: {self.symptom}\n"
            f"  likely: {'; or '.join(self.causes)}\n"
            f"  to do:  {'; '.join(self.checks)}"
        )


@dataclass
class Rule(ABC):
    """A pattern in the metrics of a run that has a name in the literature, and known causes.

    A subclass is a dataclass whose fields are its thresholds. Statistics are medians or quartiles over windows of
    logged values, so that no single step is called sick; where a metric is missing or short, nothing is found.

    Attributes:
        name: What events call it.
        reads: Prefixes of the metrics that :meth:`find` looks at.
        causes: Likely ones, the most likely first.
        checks: What to look at or change.
    """

    name: ClassVar[str]
    reads: ClassVar[tuple[str, ...]]
    causes: ClassVar[tuple[str, ...]]
    checks: ClassVar[tuple[str, ...]]

    @abstractmethod
    def find(self, history: History) -> Sequence[Finding]:
        """Return what is wrong with the newest values; nothing of a healthy run."""
