"""What TensorBoard's overview tabs are given."""

import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from callbacks.panels import PANELS, layout
from callbacks.panels import _described as described
from grpo_lit.objectives import K3, GroupAdvantage, TokenClip

README = (Path(__file__).parents[2] / "README.md").read_text()
NAMES = sorted(set(chain.from_iterable(names for charts in PANELS.values() for names in charts.values())))


def glossary() -> set[str]:
    """Return every metric of README's table in full: names after the first leave its panel out."""
    known = set()
    for row in README.split("## Metrics")[1].split("\n## ")[0].splitlines():
        panel = ""
        for name in re.findall(r"`([^`]+)`", row.split("|")[1]) if row.startswith("| `") else []:
            full = re.match(r"(val/<set>|reward|exploration|length|optimization|system|shadow)/", name)
            panel = full[1] if full else panel
            known.add(name if full else f"{panel}/{name}")
    return known


def test_five_panels() -> None:
    assert list(PANELS) == ["reward", "exploration", "length", "optimization", "system"]


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_shown_is_explained(name: str) -> None:
    explained = {re.sub(r"<\w+>|(?<=@)k", "*", known) for known in glossary()}
    assert name in explained


def test_charts_hold_their_metrics_and_no_others() -> None:
    tags = {title: tags for charts in layout().values() for title, (_, tags) in charts.items()}

    def shows(title: str, metric: str) -> bool:
        return any(re.match(tag, metric) for tag in tags[title])  # as TensorBoard does

    assert shows("accuracy in training", "reward/correct")
    assert not shows("accuracy in training", "reward/correct_kept")
    assert shows("accuracy on held-out prompts", "val/sums/greedy")
    assert shows("accuracy on held-out prompts", "val/two.words/avg@16")
    assert not shows("accuracy on held-out prompts", "val/sums/greedy/ci_low")
    assert shows("each reward", "reward/format")
    assert not shows("clipped tokens", "optimization/clip_high_bound")


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
