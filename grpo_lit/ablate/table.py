"""The table of an ablation: Markdown, CSV, JSON, and a plot."""

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lit.ablate.cells import Cell, Result, write_json
from grpo_lit.ablate.spec import Spec
from grpo_lit.metrics.intervals import t_interval, wilson
from grpo_lit.report.axis import value_at
from grpo_lit.report.charts import SHARE
from grpo_lit.report.drawing import COLOURS, label, pyplot

#: Columns, and what they hold.
MEASURES = {"last": "last", "best": "best", "equal": "at equal {over}", "gain": "gain of last [points]"}


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds.

    Attributes:
        mean: The mean.
        low: Lower end of its 95 % interval; ``None`` where none can be told.
        high: Upper end.
        interval: What the interval is of: ``seeds`` (Student's t), ``prompts`` (Wilson's, one seed), or nothing.
    """

    mean: float
    low: float | None
    high: float | None
    interval: str


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        section: ``baseline``, ``alone`` or ``cumulative``.
        name: What was added; in the cumulative section to all lines above it.
        combination: Everything that is added to the baseline.
        seeds: Finished ones.
        estimates: By measure; those that are missing have no figure yet.
    """

    section: str
    name: str
    combination: tuple[str, ...]
    seeds: list[int]
    estimates: dict[str, Estimate]


Results = Mapping[tuple[str, ...], Mapping[int, Result]]


def results_of(cells: Sequence[Cell]) -> dict[tuple[str, ...], dict[int, Result]]:
    """Return what finished runs gave, by combination and seed."""
    found: dict[tuple[str, ...], dict[int, Result]] = {cell.combination: {} for cell in cells}
    for cell in cells:
        if (result := cell.result()) is not None:
            found[cell.combination][cell.seed] = result
    return found


def equal_spent(results: Results) -> float | None:
    """Return the largest count that all finished runs reached; ``None`` where one does not log it."""
    spent = [result.spent for by_seed in results.values() for result in by_seed.values()]
    return min(s[-1] for s in spent) if spent and all(spent) else None


def rows_of(spec: Spec, results: Results) -> list[Row]:
    """Return the table's rows: the baseline, each change alone, and one after the other where they are made so."""
    names = tuple(spec.overlays)
    rows: list[tuple[str, str, tuple[str, ...]]] = [("baseline", spec.baseline, ())]
    rows += [("alone", f"+ {name}", (name,)) for name in names]
    if spec.together and len(names) > 1:
        rows += [("cumulative", f"+ {name}", names[: i + 1]) for i, name in enumerate(names)]
    place = equal_spent(results)
    return [
        Row(section, name, key, sorted(results[key]), _estimates(results[key], results[()], place, spec.metric))
        for section, name, key in rows
    ]


def _estimates(
    mine: Mapping[int, Result], baseline: Mapping[int, Result], place: float | None, metric: str
) -> dict[str, Estimate]:
    if not mine:
        return {}
    trials = min(result.held_out_prompts for result in mine.values()) if metric.endswith("/greedy") else 0
    made = {
        "last": estimate([result.values[-1] for result in mine.values()], trials),
        "best": estimate([max(result.values) for result in mine.values()], trials),
    }
    if place is not None:
        made["equal"] = estimate([value_at(r.spent, r.values, place) for r in mine.values()], trials)
    shared = [seed for seed in mine if seed in baseline and mine is not baseline]
    if shared:  # seed by seed: they share the order of prompts
        made["gain"] = estimate([mine[seed].values[-1] - baseline[seed].values[-1] for seed in shared], 0)
    return made


def estimate(values: Sequence[float], trials: int) -> Estimate:
    """Return the mean of a value per seed with its interval.

    Args:
        values: One per seed. A single one has Wilson's interval, which says how far the prompts may mislead and nothing
            of how seeds vary.
        trials: Prompts that a value is the share of; 0: not known, or it is no such share.
    """
    if len(values) > 1:
        return Estimate(statistics.fmean(values), *t_interval(values), "seeds")
    if trials and 0 <= values[0] <= 1:
        return Estimate(values[0], *wilson(values[0], trials), "prompts")
    return Estimate(values[0], None, None, "")


def markdown(spec: Spec, results: Results) -> str:
    """Return the table with a line on what its figures are."""
    place, rows = equal_spent(results), rows_of(spec, results)
    heads = [MEASURES[m].format(over=spec.over) for m in MEASURES]
    heads[2] += "" if place is None else f" ({place:,.0f})"
    lines = [f"| {spec.metric} | seeds | {' | '.join(heads)} |", "|---|" + "---|" * (len(heads) + 1)]
    for i, row in enumerate(rows):
        if row.section != "baseline" and row.section != rows[i - 1].section:
            heading = {"alone": "each alone", "cumulative": "one after the other"}[row.section]
            lines.append(f"| *{heading}* |" + " |" * (len(heads) + 1))
        figures = [_cell(row.estimates.get(measure), measure) for measure in MEASURES]
        lines.append(f"| {_plain(row.name)} | {len(row.seeds)} | {' | '.join(figures)} |")
    kinds = {e.interval for row in rows for e in row.estimates.values()}
    notes = ["`last` and `best` are of the measurements of a run; the best of several noisy ones is optimistic."]
    if place is not None:
        notes.append("Values at an equal count are interpolated linearly between measurements.")
    if "seeds" in kinds:
        notes.append("In brackets: 95 % t-intervals of the mean over seeds; gains are paired by seed.")
    if "prompts" in kinds:
        notes.append("In brackets with one seed: 95 % Wilson intervals over held-out prompts; seeds vary besides.")
    early = [
        f"{spec.title(key)}, seed {s}" for key, by in results.items() for s, r in by.items() if r.steps[-1] < r.trained
    ]
    if early:
        notes.append(f"Last measured before their last step: {'; '.join(early)}.")
    return "\n".join(lines) + "\n\n" + " ".join(notes) + "\n"


def _plain(name: str) -> str:
    return name.replace("|", "\\|").replace("\n", " ")


def _cell(value: Estimate | None, measure: str) -> str:
    if value is None:
        return ""
    sign = "+" if measure == "gain" else ""
    ends = "" if value.low is None else f" [{100 * value.low:{sign}.1f}, {100 * value.high:{sign}.1f}]"
    return f"{100 * value.mean:{sign}.1f}{'' if measure == 'gain' else ' %'}{ends}"


def write_tables(spec: Spec, results: Results) -> list[Path]:
    """Write table.md, table.csv and table.json into the output folder, and return their paths."""
    rows, place = rows_of(spec, results), equal_spent(results)
    files = [spec.output / f"table.{kind}" for kind in ("md", "csv", "json")]
    files[0].write_text(markdown(spec, results), encoding="utf-8")
    flat = [
        {"section": row.section, "name": row.name, "combination": spec.title(row.combination), "seeds": len(row.seeds),
         "measure": measure, **vars(value)}
        for row in rows
        for measure, value in row.estimates.items()
    ]  # fmt: skip
    with files[1].open("w", newline="", encoding="utf-8") as file:
        names = ["section", "name", "combination", "seeds", "measure", "mean", "low", "high", "interval"]
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(flat)
    runs = [
        {"combination": list(combination), "seed": seed, **vars(result)}
        for combination, by_seed in results.items()
        for seed, result in by_seed.items()
    ]
    write_json(files[2], {"metric": spec.metric, "over": spec.over, "equal": place, "rows": flat, "runs": runs})
    return files


def plot(spec: Spec, results: Results, target: Path) -> None:
    """Draw each row's last accuracy with its interval; and over what they had spent, each run's and the seeds' mean."""
    rows = [row for row in rows_of(spec, results) if row.estimates]
    if not rows:
        return
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 1.6 + 0.38 * max(len(rows), 5)), layout="constrained")
    colours = {key: COLOURS[i % len(COLOURS)] for i, key in enumerate(results)}
    _draw_rows(left, rows, results, colours)
    left.set_xlabel(f"last {spec.metric}")
    counted = all(result.spent for by_seed in results.values() for result in by_seed.values())
    for key, by_seed in results.items():
        runs = [(result.spent if counted else result.steps, result.values) for result in by_seed.values()]
        for x, y in runs:
            right.plot(x, y, color=colours[key], linewidth=1, alpha=0.35)
        if runs:
            # Runs are measured at the same steps: a point of the mean is of weights that have had as many.
            points = list(zip(*(zip(x, y, strict=True) for x, y in runs), strict=False))
            mean = [[statistics.fmean(pair[side] for pair in pairs) for pairs in points] for side in (0, 1)]
            right.plot(*mean, "o-", color=colours[key], linewidth=1.8, markersize=3.5, label=spec.title(key))
    right.set(xlabel=spec.over if counted else "optimizer step", ylabel=spec.metric)
    for axis, formatted in ((left, left.xaxis), (right, right.yaxis)):
        formatted.set_major_formatter(lambda value, _: label(value, SHARE))
        axis.grid(alpha=0.3)
    right.xaxis.set_major_formatter(lambda value, _: label(value, ""))
    right.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(target, dpi=120)
    plt.close(figure)


def _draw_rows(axis: Any, rows: Sequence[Row], results: Results, colours: Mapping[tuple[str, ...], str]) -> None:
    for place, row in enumerate(rows):
        value, colour = row.estimates["last"], colours[row.combination]
        ends = [value.mean if end is None else end for end in (value.low, value.high)]
        axis.plot(ends, [place, place], color=colour, linewidth=2)
        axis.plot(value.mean, place, "o", color=colour, markersize=6)
        seeds = [result.values[-1] for result in results[row.combination].values()]
        axis.plot(seeds, [place + 0.22] * len(seeds), "|", color=colour, markersize=6)
        if row.section == "baseline":
            axis.axvline(value.mean, color="#888888", linewidth=1, linestyle=":")
    names = [f"{row.name} (on top)" if row.section == "cumulative" else row.name for row in rows]
    axis.set(yticks=range(len(rows)), yticklabels=[name.replace("\n", " ") for name in names])
    axis.invert_yaxis()
