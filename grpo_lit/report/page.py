"""One page about one run or several: no network, no scripts, and nothing that a model wrote is taken for markup."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from grpo_lit.metrics.names import is_held_out
from grpo_lit.report.axis import along
from grpo_lit.report.charts import ACCURACY, OTHER, PANELS, SHARE, Chart, arrange
from grpo_lit.report.drawing import Drawing, label, svg
from grpo_lit.report.figures import accuracies, equal_lines, summary
from grpo_lit.report.health import Episode
from grpo_lit.report.record import Run
from grpo_lit.report.samples import shown

NOTHING = "–"


def page(runs: Sequence[Run], drawing: Drawing, episodes: Sequence[Episode], title: str) -> str:
    """Return the HTML.

    Args:
        runs: What it is about.
        drawing: Their curves, with a mark for each health event.
        episodes: Their health events.
        title: Above all.
    """
    # Everything is escaped unless it is Markup, and only charts are; the page forbids scripts besides.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    rows = [_run(run, colour) for run, colour in zip(runs, drawing.colours(), strict=True)]
    return environment.get_template("page.html.jinja").render(
        title=title,
        runs=rows,
        notes=[
            f"{run.name}: unreadable lines of {file} that are left out: {count}"
            for run in runs
            for file, count in run.unreadable.items()
        ],
        accuracies=[row for run in runs for row in _accuracies(run)],
        equal=equal_lines(drawing.curves, drawing.over),
        panels=_panels(drawing),
        events=episodes,
        unwatched=[run.name for run in runs if not run.watched],
        samples=[shown(run) for run in runs if run.samples],
        differing=differing([run.settings() for run in runs]),
        versions=_versions(runs),
    )


def differing(settings: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Return keys whose values are not the same everywhere, with each one's value."""
    keys = dict.fromkeys(key for one in settings for key in one)
    table = {key: [one.get(key, NOTHING) for one in settings] for key in keys}
    return [(key, values) for key, values in table.items() if len(set(values)) > 1]


def _run(run: Run, colour: str) -> dict[str, Any]:
    trained = [steps[-1] + 1 for name, (steps, _) in run.scalars.items() if not is_held_out(name)]
    planned = run.settings().get("trainer.max_steps", "")
    steps = str(max(trained, default=0))
    tokens = run.scalars.get("system/tokens_sampled", ([], []))[1]
    return {
        "name": run.name,
        "folder": str(run.folder),
        "colour": colour,
        "steps": f"{steps} of {planned}" if planned.isdigit() and planned != steps else steps,
        "tokens": f"{tokens[-1]:,.0f}" if tokens else NOTHING,
        "time": summary(run.scalars),
        "config": run.config,
    }


def _accuracies(run: Run) -> list[dict[str, str]]:
    return [
        {
            "run": run.name,
            "metric": row.metric,
            "before": f"{row.before.value:.1%} at step {row.before.step}",
            "after": f"{row.after.value:.1%} at step {row.after.step}",
            "gain": f"{100 * (row.after.value - row.before.value):+.1f} points",
            "interval": f"{row.interval[0]:.1%} to {row.interval[1]:.1%}" if row.interval else NOTHING,
            "best": f"{row.best.value:.1%} at step {row.best.step}",
        }
        for row in accuracies(run.scalars, run.held_out_prompts)
    ]


def _panels(drawing: Drawing) -> list[dict[str, Any]]:
    arranged = arrange(drawing.varying())
    constant: dict[str, list[tuple[str, str]]] = {}
    for name, value in drawing.constant().items():
        panel = next(iter(arrange([name])))
        constant.setdefault(panel, []).append((name, label(value, "")))
    return [
        {
            "name": panel,
            "charts": [_chart(drawing, chart, own) for chart, own in arranged.get(panel, [])],
            "constant": constant.get(panel, []),
        }
        for panel in (ACCURACY, *PANELS, OTHER)
        if panel in arranged or panel in constant
    ]


def _chart(drawing: Drawing, chart: Chart, names: list[str]) -> dict[str, str]:
    return {
        "title": chart.title,
        "unit": "" if chart.unit == SHARE else chart.unit,  # its ticks say percent
        "svg": Markup(svg(drawing, chart, names)),  # matplotlib escapes its text
    }


def _versions(runs: Sequence[Run]) -> list[tuple[str, list[str], bool]]:
    names = dict.fromkeys(name for run in runs for name in run.versions)
    rows = [(name, [run.versions.get(name, NOTHING) for run in runs]) for name in names]
    return [(name, values, len(set(values)) > 1) for name, values in rows]


def curves_of(runs: Sequence[Run], over: str | None) -> dict[str, Any]:
    """Return the curves of each run by its name.

    Raises:
        ConfigError: ``over`` cannot be an axis.
    """
    return {run.name: along(run.scalars, over) for run in runs}
