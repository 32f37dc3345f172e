"""Rows that are left out: how many for which reason, and where the first of them stand."""

from dataclasses import dataclass, field

from grpo_lit.rollout import Prompt

#: Rows named for each reason; more would bury the reason.
NAMED = 3


@dataclass
class Tally:
    """A count by reason.

    Attributes:
        counts: How many rows each reason has cost.
        named: The first few of them.
    """

    counts: dict[str, int] = field(default_factory=dict)
    named: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, row: str) -> None:
        """Count a row.

        Args:
            reason: What is wrong with it.
            row: How a person finds it.
        """
        self.counts[reason] = self.counts.get(reason, 0) + 1
        named = self.named.setdefault(reason, [])
        if len(named) < NAMED:
            named.append(row)

    @property
    def total(self) -> int:
        """All rows counted."""
        return sum(self.counts.values())

    def __str__(self) -> str:
        """Return ``2 with no `answer` (line 3, line 9); 1 with ...``, the most frequent reason first."""
        reasons = sorted(self.counts, key=lambda reason: -self.counts[reason])
        return "; ".join(
            f"{self.counts[reason]} with {reason} ({', '.join(self.named[reason])}"
            f"{', ...' if self.counts[reason] > len(self.named[reason]) else ''})"
            for reason in reasons
        )


def described(prompt: Prompt) -> str:
    """Return how a person recognises a prompt: its id, and the beginnings of its question and its answer."""
    return f"{prompt.id}: {prompt.question!r:.60}, answer {prompt.answer!r:.60}"
