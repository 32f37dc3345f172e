"""Every metric stands in one chart, and a chart is drawn so that it can be read."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from glossary import unexplained

from grpo_lit.report.charts import ACCURACY, OTHER, PANELS, arrange, overview_rows, panel_rows, short
from grpo_lit.report.drawing import MAX_POINTS, Drawing, Mark, label, picture, pyplot, svg, thinned

METRICS = [
    "reward/total",
    "reward/answer",
    "reward/answer_killed",
    "exploration/entropy",
    "length/mean",
    "optimization/loss",
    "shadow/cosine_gspo",
    "system/time_learn",
    "val/sums/greedy",
    "val/sums/truncated",
    "my/own",
]


def chart_of(name: str) -> tuple[str, str]:
    return next((panel, c.title) for panel, charts in arrange(METRICS).items() for c, own in charts if name in own)


def test_every_metric_stands_once_in_the_most_specific_chart() -> None:
    placed = [name for charts in arrange(METRICS).values() for _, own in charts for name in own]
    assert sorted(placed) == sorted(METRICS)
    assert chart_of("reward/answer_killed") == ("reward", "not judged")
    assert chart_of("reward/answer") == chart_of("reward/total") == ("reward", "rewards")
    assert chart_of("val/sums/truncated") == ("length", "truncated")
    assert chart_of("val/sums/greedy") == (ACCURACY, ACCURACY)
    assert chart_of("shadow/cosine_gspo")[0] == "optimization"
    assert chart_of("my/own")[0] == OTHER


def test_charts_name_metrics_that_exist() -> None:
    patterns = {p for charts in PANELS.values() for chart in charts for p in chart.patterns}
    assert unexplained({p for p in patterns if "*" not in p}) == []


def test_rows_of_a_picture() -> None:
    rows = panel_rows(METRICS)
    assert [chart.title.split(":")[0] for chart, _ in (row[0] for row in rows)][:2] == [ACCURACY, "reward"]
    assert max(map(len, rows)) <= 3
    assert overview_rows(METRICS)[0][0][0].title == ACCURACY
    assert overview_rows(["my/own"])[0][0][1] == ["my/own"]


def test_names_in_a_legend() -> None:
    assert short(["val/a/greedy", "val/b/greedy"]) == ["a/greedy", "b/greedy"]
    assert short(["length/mean", "length/correct"]) == ["mean", "correct"]
    assert short(["length/mean", "val/s/length"]) == ["length/mean", "val/s/length"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.25, "share", "25 %"), (3e-5, "", "3e-5"), (120000.0, "tokens", "120k"), (2.5e6, "", "2.5M"), (1.5, "s", "1.5")],
)
def test_ticks(value: float, unit: str, text: str) -> None:
    assert label(value, unit) == text


def test_long_curves_become_means_of_neighbours() -> None:
    x = [float(i) for i in range(10 * MAX_POINTS)]
    thin_x, thin_y = thinned(x, [2 * value for value in x])
    assert len(thin_x) == MAX_POINTS
    assert (thin_x[0], thin_y[0]) == (4.5, 9.0)  # of 0..9
    assert thinned([1.0, 2.0], [3.0, 4.0]) == ([1.0, 2.0], [3.0, 4.0])


@pytest.fixture
def drawing() -> Drawing:
    curves = {
        "_first": {"reward/total": ([0.0, 1.0], [0.5, 0.75]), "length/mean": ([0.0, 1.0], [7.0, 7.0])},
        "</svg><b>$x_": {"reward/total": ([0.0], [0.25]), "reward/<b>--><i>": ([0.0, 1.0], [0.0, 1.0])},
    }
    return Drawing(curves, None, [Mark(1.0, "1")])


def test_constant_metrics_need_no_chart(drawing: Drawing) -> None:
    assert drawing.constant() == {"length/mean": 7.0}
    assert drawing.varying() == ["reward/<b>--><i>", "reward/total"]


def test_a_chart_takes_the_pages_colours_and_no_markup(drawing: Drawing) -> None:
    ((chart, names),) = arrange(drawing.varying())["reward"]
    text = svg(drawing, chart, names)
    root = ET.fromstring(text)
    assert root.tag.endswith("svg")
    assert "width" not in root.attrib
    assert "var(--ink)" in text
    assert not re.search("#010203|#040506|#070809", text)
    assert {element.tag.split("}")[-1] for element in root.iter()}.isdisjoint({"b", "i", "metadata", "script"})
    assert "<b>--><i>" in "".join(root.itertext())


def test_no_words_of_a_picture_overlap(drawing: Drawing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plt = pyplot()
    seen = []
    monkeypatch.setattr(plt, "close", seen.append)
    metrics = [f"reward/a_long_name_{i}" for i in range(5)] + ["val/s/greedy", "exploration/entropy"]
    curves = {f"run {i}": {name: ([0.0, 1e5], [0.1 * i, 3e-5]) for name in metrics} for i in range(3)}
    drawn = Drawing(curves, "system/tokens_sampled", [Mark(5e4, "1,2")])
    picture(drawn, panel_rows(drawn.varying()), tmp_path / "p.png", "a title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = seen
    figure.draw_without_rendering()  # places everything at the resolution that is asked for below
    renderer = figure.canvas.get_renderer()
    of_all = [figure._suptitle, *figure.legends[0].get_texts()]
    boxes = {text.get_text(): text.get_window_extent(renderer) for text in of_all}
    for axis in figure.axes:
        texts = [axis.title, axis._left_title, axis.xaxis.label, *axis.texts, *axis.get_xticklabels()]
        texts += axis.get_legend().get_texts() if axis.get_legend() else []
        for text in texts:
            if text.get_text() and text.get_visible() and axis.axison:
                boxes[f"{axis.get_title('left')}/{text.get_text()}"] = text.get_window_extent(renderer)
    assert len(boxes) > 15
    names = list(boxes)
    assert [(a, b) for i, a in enumerate(names) for b in names[:i] if boxes[a].overlaps(boxes[b])] == []
    monkeypatch.undo()
    plt.close(figure)
