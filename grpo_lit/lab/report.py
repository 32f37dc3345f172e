"""What the lab says of an estimator: how far its expectation is from the truth, and how noisy it is."""

import csv
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich import box
from rich.table import Table
from torch import Tensor

from grpo_lit.errors import ConfigError
from grpo_lit.lab.enumeration import Estimate

#: An expected gradient this small against its own noise is zero up to rounding: it has no direction.
NOTHING = 1e-12
#: Left end of the plot's logarithmic axis of relative bias: what is below is none.
LEAST_BIAS = 1e-2
#: Columns that are drawn, and their labels.
PANELS = {
    "relative_bias": "bias left after the best scale (no bar: none)",
    "noise": "noise / signal of one step",
    "cosine": "cosine to the truth",
}


@dataclass(frozen=True)
class Row:
    """One estimator under one scenario, against the exact gradient.

    Attributes:
        recipe: Name of the recipe.
        scenario: Who drew the completions.
        scale: Best factor s = <E[g], t> / <t, t>; a learning rate takes it up.
        bias: ``|E[g] - t|``, as it stands.
        relative_bias: ``|E[g] - s t| / |s t|``, what no learning rate mends.
        cosine: Of E[g] to t.
        variance: tr Cov[g].
        noise: sqrt(variance) / ``|E[g]|``, one step's noise in units of its signal.
    """

    recipe: str
    scenario: str
    scale: float
    bias: float
    relative_bias: float
    cosine: float
    variance: float
    noise: float


def compare(recipe: str, scenario: str, estimate: Estimate, truth: Float[Tensor, "D"]) -> Row:
    """Return the row of an estimator; NaN where an expected gradient of zero has no direction.

    Args:
        recipe: Name of the recipe.
        scenario: Name of the scenario.
        estimate: Exact moments of the estimator.
        truth: t, the exact gradient.
    """
    mean, noise = estimate.mean, estimate.variance**0.5
    scale = float(mean @ truth / (truth @ truth))
    size = float(mean.norm())
    vanishes = size <= NOTHING * max(noise, 1.0)
    return Row(
        recipe=recipe,
        scenario=scenario,
        scale=0.0 if vanishes else scale,
        bias=float((mean - truth).norm()),
        relative_bias=torch.nan if vanishes else float((mean - scale * truth).norm() / abs(scale * truth).norm()),
        cosine=torch.nan if vanishes else float(mean @ truth) / (size * float(truth.norm())),
        variance=estimate.variance,
        noise=torch.nan if vanishes else noise / size,
    )


def table(title: str, rows: Sequence[Row]) -> Table:
    """Return the rows as a table for a terminal of 80 columns, one section per scenario."""
    result = Table(title=title, title_justify="left", box=box.SIMPLE)
    names = [field.name for field in fields(Row) if field.name not in ("recipe", "scenario")]
    result.add_column("recipe", no_wrap=True)
    for name in names:
        result.add_column(name.replace("relative_bias", "rel. bias"), justify="right", no_wrap=True)
    for scenario, of_scenario in itertools.groupby(rows, key=lambda row: row.scenario):
        result.add_section()
        result.add_row(f"[bold]{scenario}[/bold]")
        for row in of_scenario:
            result.add_row(f"  {row.recipe}", *(_cell(getattr(row, name)) for name in names))
    return result


def write_json(path: Path, settings: dict[str, Any], tables: Mapping[str, Sequence[Row]]) -> None:
    """Write the settings and the rows of each table; NaN and infinity become ``null``, which every reader takes."""
    rows = {name: [{k: _finite(v) for k, v in asdict(row).items()} for row in table] for name, table in tables.items()}
    path.write_text(json.dumps({"settings": settings, **rows}, indent=2) + "\n")


def write_csv(path: Path, tables: Mapping[str, Sequence[Row]]) -> None:
    """Write the rows of all tables with a header, the table's name first."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["table", *(f.name for f in fields(Row))])
        writer.writeheader()
        writer.writerows({"table": name, **asdict(row)} for name, table in tables.items() for row in table)


def write_plot(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draw relative bias, noise and cosine per recipe, one colour per scenario.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ConfigError("`plot` expected matplotlib, but it is not installed: pip install matplotlib") from error
    recipes = list(dict.fromkeys(row.recipe for row in rows))
    scenarios = list(dict.fromkeys(row.scenario for row in rows))
    figure, axes = plt.subplots(
        1, len(PANELS), figsize=(13, 1.6 + 0.42 * len(recipes)), sharey=True, layout="constrained"
    )
    height = 0.8 / len(scenarios)
    for axis, (name, label) in zip(axes, PANELS.items(), strict=True):
        for n, scenario in enumerate(scenarios):
            mine = [row for row in rows if row.scenario == scenario]
            where = [recipes.index(row.recipe) + (n - (len(scenarios) - 1) / 2) * height for row in mine]
            axis.barh(where, [_finite(getattr(row, name)) or 0.0 for row in mine], height=height, label=scenario)
        axis.set(xlabel=label, yticks=range(len(recipes)), yticklabels=recipes)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set(xscale="log", xlim=(LEAST_BIAS, None))
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(scenarios))
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: float) -> str:
    if value != value:
        return "-"
    return "0" if abs(value) < NOTHING else f"{value:.3g}"
