"""Charts as SVG that follows the page's colours, and all panels as one picture."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from grpo_lit.errors import ConfigError
from grpo_lit.metrics.names import is_accuracy
from grpo_lit.report.axis import Curves
from grpo_lit.report.charts import SHARE, Chart, short

#: Told apart by eyes that do not see red and green apart, on white and on black.
COLOURS = ("#3a86c8", "#e07b39", "#2a9d72", "#c0559b", "#8f75d8", "#b8912a", "#35a7b8", "#d1495b")
STYLES = ("-", "--", ":", "-.")
#: Longer curves are drawn as means of neighbouring points: a picture is a few hundred pixels wide.
MAX_POINTS = 400
#: Inks of the drawing that a page replaces by its own, light or dark.
INK, GRID, WARNING = "#010203", "#040506", "#070809"
_PAGE_COLOURS = {INK: "var(--ink)", GRID: "var(--grid)", WARNING: "var(--warning)"}
_PICTURE_COLOURS = {INK: "#222222", GRID: "#dddddd", WARNING: "#c0392b"}


@dataclass(frozen=True)
class Mark:
    """A step worth a look.

    Attributes:
        x: Where on the x-axis.
        text: A number or two.
    """

    x: float
    text: str


@dataclass(frozen=True)
class Drawing:
    """What is drawn.

    Attributes:
        curves: Of each run, by its name.
        over: Metric that the x-axis counts; ``None``: optimizer steps.
        marks: Steps that every chart shows.
    """

    curves: Mapping[str, Curves]
    over: str | None = None
    marks: Sequence[Mark] = ()

    def colours(self) -> list[str]:
        """Return the colour of each run."""
        return [COLOURS[i % len(COLOURS)] for i in range(len(self.curves))]

    def constant(self) -> dict[str, float]:
        """Return the metrics that have one value throughout all runs, which no chart needs to show."""
        values: dict[str, set[float]] = {}
        for curves in self.curves.values():
            for name, (_, y) in curves.items():
                values.setdefault(name, set()).update(y)
        return {name: next(iter(y)) for name, y in sorted(values.items()) if len(y) == 1 and not is_accuracy(name)}

    def varying(self) -> list[str]:
        """Return the other metrics."""
        constant = self.constant()
        return sorted({name for curves in self.curves.values() for name in curves} - constant.keys())


def pyplot() -> Any:
    """Return matplotlib's pyplot, set up to draw without a display and to take text as it is.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise ConfigError("pictures need matplotlib, which is not installed: pip install matplotlib") from error
    mpl.use("Agg")
    mpl.rcParams.update(
        {"svg.fonttype": "none", "text.parse_math": False, "font.size": 9, "font.family": ["DejaVu Sans", "sans-serif"]}
    )
    return plt


def svg(drawing: Drawing, chart: Chart, names: Sequence[str]) -> str:
    """Return one chart as an SVG element as wide as its place, in the colours of the page around it."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(4.4, 2.7))
    lines = _draw(axis, drawing, chart, names, _PAGE_COLOURS)
    figure.subplots_adjust(left=0.135, right=0.975, bottom=0.17, top=0.965 - 0.075 * lines - 0.05 * bool(drawing.marks))
    target = StringIO()
    with plt.rc_context({"svg.hashsalt": chart.title}):
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    text = target.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"|(?<=<g) id="[^"]*"', r"\1", text)
    for ink, variable in _PAGE_COLOURS.items():
        text = text.replace(ink, variable)
    return text


def picture(drawing: Drawing, rows: Sequence[Sequence[tuple[Chart, list[str]]]], target: Path, title: str) -> None:
    """Draw charts in rows; a row of one chart is as wide as the picture.

    Raises:
        ConfigError: There is none: a run of one step has no curves.
    """
    if not rows:
        raise ConfigError(f"`runs` expected at least two steps to draw a curve through, but got fewer: no {target}")
    plt = pyplot()
    figure = plt.figure(figsize=(4.4 * max(map(len, rows)), 2.75 * len(rows) + 0.5), layout="constrained")
    places = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    columns = max(map(len, rows))
    for place, charts in zip(places, rows, strict=True):
        width = columns if len(charts) > 1 else 1
        axes = place.subplots(1, width, squeeze=False)[0]
        for axis, (chart, names) in zip(axes, charts, strict=False):
            above = _draw(axis, drawing, chart, names, _PICTURE_COLOURS, columns / width)
            unit = f" [{chart.unit}]" if chart.unit not in ("", SHARE) else ""
            pad = 7 + 12.5 * above + 11 * bool(drawing.marks)
            axis.set_title(_plain(chart.title + unit), loc="left", fontsize=9.5, weight="bold", pad=pad)
        for axis in axes[len(charts) :]:
            axis.set_axis_off()
    if len(drawing.curves) > 1:
        lines = [plt.Line2D([], [], color=colour, linewidth=2.5) for colour in drawing.colours()]
        runs = [_plain(name) for name in drawing.curves]
        figure.legend(lines, runs, loc="outside lower center", ncols=min(len(lines), 5), frameon=False, fontsize=10)
    if title:
        figure.suptitle(_plain(title), fontsize=11)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def _draw(
    axis: Any, drawing: Drawing, chart: Chart, names: Sequence[str], inks: Mapping[str, str], width: float = 1.0
) -> int:
    """Draw a chart's curves, and return how many rows its legend has.

    One run has a colour per metric; several have one each, and a line style per metric.
    """
    ink = {key: key if inks is _PAGE_COLOURS else value for key, value in inks.items()}
    alone = len(drawing.curves) == 1
    for place, name in enumerate(names):
        # The first may be the same as another, as a total of one reward is: it shows beneath.
        beneath = {"linewidth": 3, "alpha": 0.6} if alone and place == 0 and len(names) > 1 else {"linewidth": 1.5}
        for curves, colour in zip(drawing.curves.values(), drawing.colours(), strict=True):
            if name not in curves:
                continue
            x, y = thinned(*curves[name])
            look = {"color": COLOURS[place % len(COLOURS)] if alone else colour, "marker": "o" if len(x) <= 25 else ""}
            axis.plot(x, y, STYLES[0 if alone else place % len(STYLES)], markersize=3, **look, **beneath)
    _scale(axis, chart, drawing, names)
    axis.set_xlabel(_plain(drawing.over or "optimizer step"), color=ink[INK], fontsize=8.5, labelpad=2)
    axis.tick_params(colors=ink[INK], labelsize=8.5, length=2)
    axis.grid(color=ink[GRID], linewidth=0.7)
    axis.set_axisbelow(True)
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(ink[INK])
    above = {"transform": axis.get_xaxis_transform(), "ha": "center", "va": "bottom", "fontsize": 7.5}
    for mark in drawing.marks:
        axis.axvline(mark.x, color=ink[WARNING], linewidth=1, linestyle=(0, (2, 2)))
        axis.text(mark.x, 1.0, mark.text, color=ink[WARNING], **above)
    return _legend(axis, names, ink[INK], alone, bool(drawing.marks), width)


def _legend(axis: Any, names: Sequence[str], ink: str, alone: bool, marked: bool, width: float) -> int:
    """Say above the axes which line is which metric, and return in how many rows."""
    if len(names) == 1:
        return 0
    plt = pyplot()
    labels = [_plain(label) for label in short(names)]
    columns = max(1, min(len(names), int(width * 62 / (max(map(len, labels)) + 7))))
    colours = [COLOURS[i % len(COLOURS)] if alone else ink for i in range(len(names))]
    styles = [STYLES[0 if alone else i % len(STYLES)] for i in range(len(names))]
    lines = [plt.Line2D([], [], color=c, linestyle=s, linewidth=1.5) for c, s in zip(colours, styles, strict=True)]
    place = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "ncols": columns}
    # In units of the font, as is what is left free for the numbers of marks.
    spaces = {"handlelength": 2, "columnspacing": 1.2, "borderpad": 0.1, "labelspacing": 0.2}
    spaces["borderaxespad"] = 1.3 if marked else 0.3
    axis.legend(lines, labels, frameon=False, fontsize=8, labelcolor=ink, **place, **spaces)
    return math.ceil(len(names) / columns)


def _scale(axis: Any, chart: Chart, drawing: Drawing, names: Sequence[str]) -> None:
    """Begin at 0 what cannot be negative, end shares at 1, and spread what spans decades."""
    drawn = [curves[name][1] for curves in drawing.curves.values() for name in names if name in curves]
    values = sorted(v for ys in drawn for v in ys if math.isfinite(v))
    if not values:
        return
    low, high, middle = values[0], values[-1], values[len(values) // 2]
    if low > 0 and high > 100 * middle and chart.unit != SHARE:
        axis.set_yscale("log")
    elif low >= 0:
        top = high * 1.06 or 1.0
        axis.set_ylim(0, min(top, 1.02) if chart.unit == SHARE else top)
    axis.yaxis.set_major_formatter(lambda value, _: label(value, chart.unit))
    axis.xaxis.set_major_formatter(lambda value, _: label(value, ""))
    axis.locator_params(axis="x", nbins=6, integer=True)
    if axis.get_yscale() == "linear":
        axis.locator_params(axis="y", nbins=5)


def label(value: float, unit: str) -> str:
    """Return a tick's text in at most six characters or so: shares as percent, large counts in thousands."""
    if unit == SHARE:
        return f"{100 * value:.3g} %"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.3g}".replace("e-0", "e-")


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the means of so many neighbours that at most :data:`MAX_POINTS` are left."""
    size = math.ceil(len(x) / MAX_POINTS)
    parts = range(0, len(x), max(size, 1))
    return [_mean(x[i : i + size]) for i in parts], [_mean(y[i : i + size]) for i in parts]


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _plain(text: str) -> str:
    """Return text that a legend shows: matplotlib hides what begins with an underscore."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return f" {shown}" if shown.startswith("_") else shown
