"""The figures of the table, from event files whose means can be had by hand."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_lit.ablate.cells import Cell, cells_of, write_json
from grpo_lit.ablate.spec import Spec
from grpo_lit.ablate.table import equal_spent, estimate, markdown, plot, results_of, rows_of, write_tables
from grpo_lit.errors import ConfigError
from grpo_lit.metrics.intervals import t_interval, wilson


@pytest.fixture
def finished(make_spec: Callable, log: Callable) -> tuple[Spec, list[Cell]]:
    """Two seeds of everything but the last run; the change called tokens spends twice as much a step."""
    spec = make_spec()
    cells = cells_of(spec, [])
    after = {
        (): (0.5, 0.6),
        ("Clip higher",): (0.7, 0.7),
        ("tokens",): (0.4, 0.4),
        ("Clip higher", "tokens"): (0.9, None),
    }
    for cell in cells:
        if (value := after[cell.combination][cell.seed]) is not None:
            log(cell, {0: 0.1, 2: 0.8, 4: value}, 200.0 if cell.combination == ("tokens",) else 100.0)
            write_json(cell.folder / "versions.json", {"held_out_prompts": {"letters": 50}})
            cell.finish(keep_checkpoints=False)
    return spec, cells


def test_rows(finished: tuple[Spec, list[Cell]]) -> None:
    spec, cells = finished
    results = results_of(cells)
    rows = rows_of(spec, results)
    assert [(row.section, row.name, row.seeds) for row in rows] == [
        ("baseline", "GRPO", [0, 1]),
        ("alone", "+ Clip higher", [0, 1]),
        ("alone", "+ tokens", [0, 1]),
        ("cumulative", "+ Clip higher", [0, 1]),  # one run, shown in both sections
        ("cumulative", "+ tokens", [0]),
    ]
    alone = rows_of(replace(spec, together=False), results)
    assert [row.section for row in alone] == ["baseline", "alone", "alone"]
    base, clip, tokens, _, both = (row.estimates for row in rows)
    assert base["last"].mean == pytest.approx(0.55)
    assert (base["last"].low, base["last"].high) == pytest.approx(t_interval([0.5, 0.6]), abs=1e-5)
    assert base["last"].interval == "seeds"
    assert base["best"].mean == pytest.approx(0.8)
    assert "gain" not in base
    # Seed by seed: .7 - .5 and .7 - .6.
    assert clip["gain"].mean == pytest.approx(0.15)
    assert (clip["gain"].low, clip["gain"].high) == pytest.approx(t_interval([0.2, 0.1]), abs=1e-5)
    assert (both["last"].low, both["last"].high) == pytest.approx(wilson(0.9, 50))
    assert both["last"].interval == "prompts"
    assert (both["gain"].mean, both["gain"].low) == (pytest.approx(0.4), None)  # of seed 0 alone
    # The baseline reached 400 tokens; the accuracy of step 2 had cost 200, of tokens 400.
    assert equal_spent(results) == 400.0
    assert base["equal"].mean == pytest.approx(0.55)
    assert tokens["equal"].mean == pytest.approx(0.8)


def test_files(finished: tuple[Spec, list[Cell]]) -> None:
    spec, cells = finished
    files = write_tables(spec, results_of(cells))
    text = files[0].read_text()
    assert "| GRPO | 2 | 55.0 % [-8.5, 118.5] | 80.0 %" in text
    assert "at equal system/tokens_sampled (400)" in text
    assert "| *one after the other* |" in text
    assert "| + tokens | 1 | 90.0 % [78.6, 95.7] |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    assert all(word in text for word in ("t-intervals", "Wilson", "optimistic", "linearly"))
    with files[1].open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [lines[0][key] for key in ("section", "combination", "seeds", "measure")] == [
        "baseline",
        "GRPO",
        "2",
        "last",
    ]
    assert float(lines[0]["mean"]) == pytest.approx(0.55)
    content = json.loads(files[2].read_text())
    assert (len(content["runs"]), content["equal"]) == (7, 400.0)
    plot(spec, results_of(cells), Path("table.png"))
    assert Path("table.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_measured_before_its_end_only_is_named(make_spec: Callable, log: Callable) -> None:
    spec = make_spec(seeds=[0])
    cells = cells_of(spec, [])
    for cell in cells[:2]:
        log(cell, {0: 0.1, 4: 0.5})
    for cell in cells[:2]:
        cell.finish(keep_checkpoints=False)
    assert "before their last step" not in markdown(spec, results_of(cells))
    results = results_of(cells)
    short = replace(results[()][0], steps=[0, 2])
    assert "Last measured before their last step: GRPO, seed 0." in markdown(spec, {**results, (): {0: short}})


def test_a_table_of_nothing_yet(make_spec: Callable) -> None:
    spec = make_spec()
    results = results_of(cells_of(spec, []))
    assert "| GRPO | 0 |  |  |  |  |" in markdown(spec, results)
    plot(spec, results, Path("table.png"))
    assert not Path("table.png").exists()


def test_one_change_has_no_cumulative_section(make_spec: Callable) -> None:
    spec = make_spec(overlays={"a": {"x": 1}})
    assert [row.section for row in rows_of(spec, results_of(cells_of(spec, [])))] == ["baseline", "alone"]


@pytest.mark.parametrize(("values", "trials", "interval"), [([0.5], 0, ""), ([-0.5], 10, ""), ([0.5], 10, "prompts")])
def test_an_interval_is_given_only_where_there_is_one(values: list[float], trials: int, interval: str) -> None:
    assert estimate(values, trials).interval == interval


def test_a_run_without_the_metric_is_not_finished(make_spec: Callable, log: Callable) -> None:
    cell = cells_of(make_spec(metric="val/letters/avg@4"), [])[0]
    log(cell, {0: 0.1, 2: 0.5})
    with pytest.raises(ConfigError, match=r"val/letters/avg@4; they log val/letters/greedy"):
        cell.finish(keep_checkpoints=False)
    assert cell.result() is None


@pytest.mark.parametrize("keep", [True, False])
def test_checkpoints_of_finished_runs_are_deleted_unless_wanted(keep: bool, make_spec: Callable, log: Callable) -> None:
    cell = cells_of(make_spec(), [])[0]
    log(cell, {0: 0.1, 2: 0.5})
    (cell.folder / "checkpoints").mkdir()
    result = cell.finish(keep_checkpoints=keep)
    assert (cell.folder / "checkpoints").exists() == keep
    assert cell.result() == result
    assert (result.steps, result.spent, result.seconds) == ([0, 2], [0.0, 200.0], 60.0)
