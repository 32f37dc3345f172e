"""What TensorBoard's overview tabs are given."""

import re
from typing import Any

import pytest
from glossary import glossary

from callbacks.panels import _described as described
from callbacks.panels import layout
from grpo_lit.objectives import K3, GroupAdvantage, TokenClip
from grpo_lit.report.charts import arrange


def test_five_panels_led_by_the_held_out_accuracy() -> None:
    assert list(layout()) == ["reward", "exploration", "length", "optimization", "system"]
    assert next(iter(layout()["reward"])) == "held-out accuracy [share]"


def test_charts_hold_their_metrics_and_no_others() -> None:
    tags = {title: tags for charts in layout().values() for title, (_, tags) in charts.items()}

    def shows(title: str, metric: str) -> bool:
        return any(re.match(tag, metric) for tag in tags[title])  # as TensorBoard does

    assert shows("solve rate [share]", "reward/correct")
    assert shows("held-out accuracy [share]", "val/sums/greedy")
    assert shows("held-out accuracy [share]", "val/two.words/avg@16")
    assert not shows("held-out accuracy [share]", "val/sums/greedy/ci_low")
    assert shows("rewards [mean]", "reward/format")
    assert shows("rewards [mean]", "reward/total")
    assert shows("not judged [share]", "reward/format_killed")
    for other in ("reward/correct", "reward/correct_kept", "reward/format_killed"):
        assert not shows("rewards [mean]", other)
    assert not shows("clipped tokens [share]", "optimization/clip_high_bound")


#: Every metric of README, of a run with a reward ``form``, names ``some`` and numbers 8; held-out domains and rewards
#: have charts of their own in the report.
METRICS = sorted(
    {name.replace("reward/*_", "reward/form_").replace("@*", "@8").replace("from_*", "from_8").replace("*", "some")
     for name in glossary() if not re.match(r"val/\*/(greedy/|reward_)", name)}
)  # fmt: skip


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_in_one_chart_the_same_on_tensorboard_and_in_the_report(name: str) -> None:
    ((chart, _),) = next(charts for charts in arrange([name]).values())
    fitting = [title for charts in layout().values() for title, (_, tags) in charts.items()
               if any(re.match(tag, name) for tag in tags)]  # fmt: skip
    assert [title.split(" [")[0] for title in fitting] == [chart.title]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (None, "none"),
        (TokenClip(low=0.0, high=0.28), "TokenClip(low=0.0, high=0.28)"),
        (K3(beta=0.04), "K3("),
        (GroupAdvantage(scale="none"), "GroupAdvantage(scale=none"),
    ],
)
def test_parts_are_described_shortly(part: Any, expected: str) -> None:
    assert described(part).startswith(expected)
    assert "False" not in described(part)
