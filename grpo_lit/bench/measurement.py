"""What was measured, and medians of it."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Measurement:
    """One step of one arm.

    Attributes:
        arm: Its name.
        groups: Of the rollout.
        tokens: Completion tokens.
        loss: Of the step.
        gradient_seconds: From the rollout to its gradient.
        optimizer_seconds: Of the update.
        peak_gib: Most memory during a step of this size, less ``resident_gib``: activations, logits and gradients. That
            step is not timed, and what others have freed is handed back before it.
        resident_gib: Memory with weights, reference and optimizer state, before the first step; freed memory is handed
            back before it is looked at, so that no gradient hides in it.
        flops: What the gradient cannot do without; see :func:`step_flops`.
        matmul_flops_per_second: Best matrix product of this process right before and after.
    """

    arm: str
    groups: int
    tokens: int
    loss: float
    gradient_seconds: float
    optimizer_seconds: float
    peak_gib: float
    resident_gib: float
    flops: float
    matmul_flops_per_second: float

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens over the time of the gradient."""
        return self.tokens / self.gradient_seconds

    @property
    def matmul_share(self) -> float:
        """Necessary operations per second over those of a matrix product."""
        return self.flops / self.gradient_seconds / self.matmul_flops_per_second


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest over rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Return those of some numbers."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Summary:
    """One arm at one size, over all rounds.

    Attributes:
        arm: Its name.
        groups: Of the rollout.
        tokens_per_second: Completion tokens over the time of the gradient.
        times_plain: Its rate over the plain learner's in the same round; ``None`` where that was not measured.
        peak_gib: The highest of all rounds.
        peak_of_plain: Over the plain learner's.
        matmul_share: Necessary operations per second over those of a matrix product.
        microseconds_per_token: Of the gradient, for each completion token.
        optimizer_seconds: Of the update.
    """

    arm: str
    groups: int
    tokens_per_second: Spread
    times_plain: Spread | None
    peak_gib: float
    peak_of_plain: float | None
    matmul_share: Spread
    microseconds_per_token: Spread
    optimizer_seconds: Spread


def summarise(measured: Sequence[Measurement]) -> list[Summary]:
    """Return a summary for each arm and size, in the order in which they came first."""
    cases = list(dict.fromkeys((m.groups, m.arm) for m in measured))
    return [_summary(measured, arm, groups) for groups, arm in sorted(cases, key=lambda case: case[0])]


def _summary(measured: Sequence[Measurement], arm: str, groups: int) -> Summary:
    mine, plain = ([m for m in measured if (m.arm, m.groups) == (name, groups)] for name in (arm, "plain"))

    def spread(value: Callable[[Measurement], float]) -> Spread:
        return Spread.of([value(m) for m in mine])

    # An arm may have ended before the last round: the rounds that both have are compared.
    ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(mine, plain, strict=False)]
    peak = max(m.peak_gib for m in mine)
    return Summary(
        arm=arm,
        groups=groups,
        tokens_per_second=spread(lambda m: m.tokens_per_second),
        times_plain=Spread.of(ratios) if ratios else None,
        peak_gib=peak,
        peak_of_plain=peak / max(m.peak_gib for m in plain) if plain else None,
        matmul_share=spread(lambda m: m.matmul_share),
        microseconds_per_token=spread(lambda m: 1e6 / m.tokens_per_second),
        optimizer_seconds=spread(lambda m: m.optimizer_seconds),
    )


def flatness(summaries: Sequence[Summary], arm: str, value: Callable[[Summary], float]) -> float | None:
    """Return how far a figure of the largest is above that of the smallest: 0.1 is 10 %; ``None``: one size.

    Args:
        summaries: Of all arms and sizes.
        arm: Which of them.
        value: The figure.
    """
    values = [value(s) for s in summaries if s.arm == arm]
    return max(values) / min(values) - 1 if len(values) > 1 else None
