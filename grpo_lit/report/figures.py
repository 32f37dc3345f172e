"""The few figures that sum a run up."""

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_lit.metrics.intervals import wilson
from grpo_lit.metrics.names import by_importance
from grpo_lit.report.axis import Curves, along, reached_by_all, value_at
from grpo_lit.report.events import Scalars


@dataclass(frozen=True)
class Measured:
    """A value and the step it was measured at."""

    value: float
    step: int


@dataclass(frozen=True)
class Accuracy:
    """A held-out accuracy of a run.

    Attributes:
        metric: Its name.
        before: The first one.
        after: The last one.
        best: The largest: the maximum of noisy values, so an optimistic figure.
        interval: Wilson's of ``after`` over the prompts of the set, 95 %; ``None`` where their number is not known, or
            where it is not one answer per prompt.
    """

    metric: str
    before: Measured
    after: Measured
    best: Measured
    interval: tuple[float, float] | None


def accuracies(scalars: Scalars, held_out_prompts: Mapping[str, int]) -> list[Accuracy]:
    """Return the held-out accuracies of a run, the most important first.

    Args:
        scalars: Of the run.
        held_out_prompts: How many each set has, where known.
    """
    found = []
    for name in by_importance(scalars):
        steps, values = scalars[name]
        measured = [Measured(value, step) for step, value in zip(steps, values, strict=True)]
        _, data_set, kind = name.split("/", 2) if name.count("/") >= 2 else ("", "", name)
        count = held_out_prompts.get(data_set, 0)
        after = measured[-1]
        interval = wilson(after.value, count) if kind == "greedy" and count and 0 <= after.value <= 1 else None
        best = max(measured, key=lambda m: m.value)
        found.append(Accuracy(name, measured[0], after, best, interval))
    return found


def at_equal_x(curves: Mapping[str, Curves]) -> dict[str, tuple[float, dict[str, float]]]:
    """Return for each accuracy that all runs have the largest x that all reached, and each run's value there.

    Args:
        curves: By name of the run. Between two measurements values are interpolated linearly.
    """
    shared = [
        name for name in by_importance(next(iter(curves.values()))) if all(name in run for run in curves.values())
    ]
    places = {name: reached_by_all(list(curves.values()), name) for name in shared}
    return {
        name: (x, {run: value_at(*own[name], x) for run, own in curves.items()})
        for name, x in places.items()
        if x is not None
    }


def summary(scalars: Scalars) -> str:
    """Return how many steps a run made, in what time, and how much of it was spent on rollouts and learning."""
    seconds = scalars.get("system/time_step", ([], []))[1]
    busy = sum(sum(scalars.get(f"system/time_{phase}", ([], []))[1]) for phase in ("rollout", "learn"))
    if not seconds:
        return "no time was logged"
    return f"{len(seconds)} steps in {sum(seconds):.0f} s, {busy / sum(seconds):.1%} in rollouts and learning"


def printed(runs: Mapping[str, Scalars], over: str | None) -> list[str]:
    """Return the lines that sum runs up: their accuracies, each where it was measured, and all at equal x.

    Args:
        runs: Scalars by name.
        over: Metric of the x-axis, ``None`` for optimizer steps.

    Raises:
        ConfigError: ``over`` cannot be an axis.
    """
    lines, curves = [], {name: along(scalars, over) for name, scalars in runs.items()}
    for run, scalars in runs.items():
        lead = f"{run}: " if len(runs) > 1 else ""
        for name in by_importance(scalars):
            steps, values = scalars[name]
            where = [
                f"step {step}" if over is None else f"{x:.0f}"
                for step, x in zip(steps, curves[run][name][0], strict=True)
            ]
            unit = "" if over is None else f" (over {over})"
            points = ", ".join(f"{value:.1%} at {at}" for value, at in zip(values, where, strict=True))
            lines.append(f"{lead}{name}{unit}: {points}")
        lines.append(lead + summary(scalars))
    return lines + equal_lines(curves, over)


def equal_lines(curves: Mapping[str, Curves], over: str | None) -> list[str]:
    """Return a line per accuracy that compares several runs at the largest x that all of them reached."""
    if len(curves) < 2:
        return []
    return [
        f"{name} at {f'step {x:.0f}' if over is None else f'{over} = {x:.0f}'}, the largest that all runs reached, "
        "linear between measurements: " + ", ".join(f"{run} {value:.1%}" for run, value in values.items())
        for name, (x, values) in at_equal_x(curves).items()
    ]
